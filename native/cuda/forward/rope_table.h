// Cosines and sines of RoPE for the GPU, with the arithmetic of native/cpu/rope.cc: angles in fp32 from fp32 inverse
// frequencies, cos and sin rounded to Element unless the recipe rounds once.
#pragma once
#include <cstdint>
#include <vector>

#include "core/model.h"

namespace refit::cuda {

// Positions [begin, end): each head_dim floats, cos [head_dim / 2] then sin [head_dim / 2].
std::vector<float> rope_table(const ModelRecipe& recipe, int64_t begin, int64_t end);

}  // namespace refit::cuda
