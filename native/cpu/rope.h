// Rotary position embedding, rotate-half form, with Hugging Face's precision: angles in fp32 from fp32 inverse
// frequencies, cos and sin rounded to the dtype, every product and the sum rounded. If the recipe rounds once, only
// the sum is rounded.
#pragma once
#include <cstdint>
#include <vector>

#include "core/model.h"
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

class Rope {
 public:
  Rope(const ModelRecipe& recipe, DType dtype);
  // Makes the tables of positions [0, positions). No other thread may read them during the call.
  void reserve(int64_t positions);
  // Rotates `heads` heads of x in place. tmp: 2 * heads * head_dim floats.
  void apply(const Context& ctx, float* x, int heads, int64_t position, float* tmp) const;

 private:
  int half_;
  float scale_;
  DType table_dtype_;
  std::vector<float> inv_freq_;
  int64_t positions_ = 0;
  std::vector<float> tables_;  // [position] { cos [half], sin [half] }
};

}  // namespace refit::cpu
