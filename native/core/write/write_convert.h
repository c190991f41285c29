// Copies of contiguous elements between storage dtypes, as the scatter of a write needs them.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace refit {

// Copies n elements from src (any alignment) to dst (aligned to its element). The same dtype keeps the bits. Others are
// rounded to nearest even, with NaN quieted if they are rounded. Every instruction set gives the bits of core/dtype.h.
using Convert = void (*)(const uint8_t* src, uint8_t* dst, int64_t n);

// The copy function for this CPU. Every call returns the same pointer.
Convert converter(DType from, DType to);

// The same for elements `stride` bytes apart.
void convert_strided(DType from, DType to, const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n);

}  // namespace refit
