// Copies of contiguous elements between storage dtypes, as the scatter of a write needs them.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace refit {

// n elements from src (any alignment) to dst (aligned to its element). Same dtype: the bits, unchanged. To bf16: round
// to nearest even, NaN quieted. The bits are those of core/dtype.h on every instruction set.
using Convert = void (*)(const uint8_t* src, uint8_t* dst, int64_t n);

// `to` is bf16 or fp32. Picked for this CPU; the same pointer at every call.
Convert converter(DType from, DType to);

// The same for elements `stride` bytes apart.
void convert_strided(DType from, DType to, const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n);

}  // namespace refit
