// The noise of Store::scramble on a GPU, equal bit for bit.
#pragma once
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

// Writes noise to `count` elements of one parameter; `address` counts parameters rank by rank.
void scramble(Element* out, int64_t count, uint64_t seed, uint64_t address, cudaStream_t stream);

}  // namespace refit::cuda
