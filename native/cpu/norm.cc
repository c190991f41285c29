#include "cpu/norm.h"

#include <cmath>

namespace refit::cpu {
namespace {

void multiply(float* x, const float* w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= w[i];
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

}  // namespace

void rms_norm(const Context& ctx, const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float rstd = 1.0f / std::sqrt(ctx.k.sum_squares(x, n) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd;
  ctx.round(out, n);
  multiply(out, weight, n);
  ctx.round(out, n);
}

void add_and_norm(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  float* out, int64_t rows, int64_t n, float eps) {
  for_blocks(ctx.pool, rows, n, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* hr = h + row * n;
      if (ranks > 0) {
        float* sum = parts[0] + row * n;
        for (int rank = 1; rank < ranks; ++rank) add(sum, parts[rank] + row * n, n);
        if (bias != nullptr) add(sum, bias, n);
        ctx.round(sum, n);
        add(hr, sum, n);
        ctx.round(hr, n);
      }
      if (weight != nullptr) rms_norm(ctx, hr, weight, out + row * n, n, eps);
    }
  });
}

}  // namespace refit::cpu
