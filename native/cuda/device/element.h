// The element: the 16-bit format of weights, activations and KV cache, and all that depends on its bits. A CUDA library
// computes in one format: fp16 if it is compiled with REFIT_FP16, else bf16.
#pragma once
#ifdef REFIT_NO_ELEMENT
#error "this source is compiled once for all formats (native/cuda/CMakeLists.txt)"
#endif
#ifdef REFIT_FP16
#include <cuda_fp16.h>
#else
#include <cuda_bf16.h>
#endif

#include <cstdint>

#include "core/dtype.h"

#ifdef REFIT_FP16

// The element's name in PTX.
#define REFIT_ELEMENT_PTX "f16"

namespace refit::cuda {

constexpr DType kElementType = DType::kFloat16;
using Element = __half;
using Element2 = __half2;

// Two elements of value 1.
constexpr uint32_t kElementOnes = 0x3c003c00;

// Conversions round to nearest even.
__host__ __device__ __forceinline__ float to_float(Element v) { return __half2float(v); }
__host__ __device__ __forceinline__ Element to_element(float v) { return __float2half_rn(v); }
__host__ __device__ __forceinline__ Element double_to_element(double v) { return __double2half(v); }
__host__ __device__ __forceinline__ Element2 to_elements(float low, float high) { return __floats2half2_rn(low, high); }
__host__ __device__ __forceinline__ Element2 pair_elements(Element low, Element high) {
  return __halves2half2(low, high);
}

__host__ __device__ __forceinline__ uint16_t element_bits(Element v) { return __half_as_ushort(v); }
__host__ __device__ __forceinline__ Element element_of_bits(uint16_t bits) { return __ushort_as_half(bits); }

#ifdef __CUDACC__
// The lower or the upper element of a word.
template <int kHalf>
__device__ __forceinline__ float half_to_float(uint32_t word) {
  return to_float(element_of_bits(static_cast<uint16_t>(kHalf == 0 ? word & 0xffffu : word >> 16)));
}
#endif

}  // namespace refit::cuda

#else

#define REFIT_ELEMENT_PTX "bf16"

namespace refit::cuda {

constexpr DType kElementType = DType::kBFloat16;
using Element = __nv_bfloat16;
using Element2 = __nv_bfloat162;

constexpr uint32_t kElementOnes = 0x3f803f80;

__host__ __device__ __forceinline__ float to_float(Element v) { return __bfloat162float(v); }
__host__ __device__ __forceinline__ Element to_element(float v) { return __float2bfloat16_rn(v); }
__host__ __device__ __forceinline__ Element double_to_element(double v) { return __double2bfloat16(v); }
__host__ __device__ __forceinline__ Element2 to_elements(float low, float high) {
  return __floats2bfloat162_rn(low, high);
}
__host__ __device__ __forceinline__ Element2 pair_elements(Element low, Element high) {
  return __halves2bfloat162(low, high);
}

__host__ __device__ __forceinline__ uint16_t element_bits(Element v) { return __bfloat16_as_ushort(v); }
__host__ __device__ __forceinline__ Element element_of_bits(uint16_t bits) { return __ushort_as_bfloat16(bits); }

#ifdef __CUDACC__
template <int kHalf>
__device__ __forceinline__ float half_to_float(uint32_t word) {
  return __uint_as_float(kHalf == 0 ? word << 16 : word & 0xffff0000u);
}
#endif

}  // namespace refit::cuda

#endif

namespace refit::cuda {

static_assert(sizeof(Element) == size_of(kElementType));

__host__ __device__ __forceinline__ float round_element(float v) { return to_float(to_element(v)); }

// By the element's format.
template <class T>
constexpr T of_element(T for_bf16, T for_fp16) {
  return kElementType == DType::kFloat16 ? for_fp16 : for_bf16;
}

}  // namespace refit::cuda
