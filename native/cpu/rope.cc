#include "cpu/rope.h"

#include <cmath>

namespace refit::cpu {

Rope::Rope(const ModelRecipe& recipe, DType dtype)
    : half_(recipe.head_dim / 2),
      scale_(static_cast<float>(recipe.rope_scale)),
      table_dtype_(recipe.round_once ? DType::kFloat32 : dtype),
      inv_freq_(recipe.rope_inv_freq.begin(), recipe.rope_inv_freq.end()) {}

void Rope::reserve(int64_t positions) {
  if (positions <= positions_) return;
  positions = std::max(positions, positions_ + positions_ / 2);
  tables_.resize(static_cast<size_t>(positions) * 2 * half_);
  for (int64_t p = positions_; p < positions; ++p) {
    float* cos = tables_.data() + p * 2 * half_;
    float* sin = cos + half_;
    for (int i = 0; i < half_; ++i) {
      // The product is rounded to fp32 as in the reference; only then is the angle widened.
      const float angle = static_cast<float>(p) * inv_freq_[i];
      cos[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale_;
      sin[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale_;
      cos[i] = round_to(table_dtype_, cos[i]);
      sin[i] = round_to(table_dtype_, sin[i]);
    }
  }
  positions_ = positions;
}

void Rope::apply(const Context& ctx, float* x, int heads, int64_t position, float* tmp) const {
  const float* cos = tables_.data() + position * 2 * half_;
  const float* sin = cos + half_;
  const int64_t n = static_cast<int64_t>(heads) * 2 * half_;
  float* straight = tmp;
  float* turned = tmp + n;
  for (int head = 0; head < heads; ++head) {
    const int64_t lo = static_cast<int64_t>(head) * 2 * half_, hi = lo + half_;
    for (int i = 0; i < half_; ++i) straight[lo + i] = x[lo + i] * cos[i];
    for (int i = 0; i < half_; ++i) straight[hi + i] = x[hi + i] * cos[i];
    for (int i = 0; i < half_; ++i) turned[lo + i] = -x[hi + i] * sin[i];
    for (int i = 0; i < half_; ++i) turned[hi + i] = x[lo + i] * sin[i];
  }
  ctx.round_between(tmp, 2 * n);
  for (int64_t i = 0; i < n; ++i) x[i] = straight[i] + turned[i];
  ctx.round(x, n);
}

}  // namespace refit::cpu
