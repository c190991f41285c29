// The element: the 16-bit format of weights, activations and KV cache, and all that depends on its bits. One CUDA
// library computes in one format.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

// The element's name in PTX.
#define REFIT_ELEMENT_PTX "bf16"

namespace refit::cuda {

using Element = __nv_bfloat16;
using Element2 = __nv_bfloat162;

// Two elements of value 1.
constexpr uint32_t kElementOnes = 0x3f803f80;

// Conversions round to nearest even.
__host__ __device__ __forceinline__ float to_float(Element v) { return __bfloat162float(v); }
__host__ __device__ __forceinline__ Element to_element(float v) { return __float2bfloat16_rn(v); }
__host__ __device__ __forceinline__ Element double_to_element(double v) { return __double2bfloat16(v); }
__host__ __device__ __forceinline__ float round_element(float v) { return to_float(to_element(v)); }
__host__ __device__ __forceinline__ Element2 to_elements(float low, float high) {
  return __floats2bfloat162_rn(low, high);
}
__host__ __device__ __forceinline__ Element2 pair_elements(Element low, Element high) {
  return __halves2bfloat162(low, high);
}

__host__ __device__ __forceinline__ uint16_t element_bits(Element v) { return __bfloat16_as_ushort(v); }
__host__ __device__ __forceinline__ Element element_of_bits(uint16_t bits) { return __ushort_as_bfloat16(bits); }

#ifdef __CUDACC__
// The lower or the upper element of a word.
template <int kHalf>
__device__ __forceinline__ float half_to_float(uint32_t word) {
  return __uint_as_float(kHalf == 0 ? word << 16 : word & 0xffff0000u);
}
#endif

}  // namespace refit::cuda
