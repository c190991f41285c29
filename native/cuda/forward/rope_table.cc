#include "cuda/forward/rope_table.h"

#include <cmath>

#include "cuda/device/element.h"

namespace refit::cuda {

std::vector<float> rope_table(const ModelRecipe& recipe, int64_t begin, int64_t end) {
  const int half = recipe.head_dim / 2;
  const auto scale = static_cast<float>(recipe.rope_scale);
  const std::vector<float> inv_freq(recipe.rope_inv_freq.begin(), recipe.rope_inv_freq.end());
  std::vector<float> table(static_cast<size_t>(end - begin) * recipe.head_dim);
  for (int64_t p = begin; p < end; ++p) {
    float* cos = table.data() + (p - begin) * recipe.head_dim;
    float* sin = cos + half;
    for (int i = 0; i < half; ++i) {
      // The product is rounded to fp32 as in the reference; only then is the angle widened.
      const float angle = static_cast<float>(p) * inv_freq[i];
      cos[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale;
      sin[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale;
      if (!recipe.round_once) cos[i] = round_to(kElementType, cos[i]), sin[i] = round_to(kElementType, sin[i]);
    }
  }
  return table;
}

}  // namespace refit::cuda
