// Shared by the small kernels: Elements in vectors, the sum of a block, and exp as native/cpu computes it.
#pragma once
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

// N adjacent elements, moved in one access; N = 8 is 16 bytes.
template <int N>
struct alignas(N * sizeof(Element)) Elements {
  Element v[N];

  __device__ __forceinline__ static Elements load(const Element* p) { return *reinterpret_cast<const Elements*>(p); }
  __device__ __forceinline__ void store(Element* p) const { *reinterpret_cast<Elements*>(p) = *this; }
};

__device__ __forceinline__ float rstd_of(float sum_squares, int64_t elements, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_squares, static_cast<float>(elements)), eps)));
}

// The sum over a block of whole warps, the same bits in every thread. `shared`: 32 floats that nothing else uses until
// the next __syncthreads of the caller.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps == 1) return x;
  if (lane == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < warps ? shared[lane] : 0.0f;
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// vexp of native/cpu/isa/kernels_vec.h, operation for operation, with its fused multiply-adds: the same bits as the
// sets of x86 that have them. The intrinsics keep the compiler from fusing others.
__device__ __forceinline__ float exp_as_cpu(float x) {
  // Comparisons, not fminf and fmaxf: these would lose a NaN.
  x = x > 89.0f ? 89.0f : x;
  x = x < -110.0f ? -110.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: leaves the rounded integer in the low bits
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896341f), magic);
  const float n = __fsub_rn(shifted, magic);
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  const int whole = __float_as_int(shifted) - 0x4b400000;
  const int half = whole >> 1, rest = whole - half;
  return __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)), __int_as_float((rest + 127) << 23));
}

__device__ __forceinline__ float times_sigmoid_as_cpu(float g, float t) {
  const float e = exp_as_cpu(-fabsf(t));
  const float positive = __fdiv_rn(g, __fadd_rn(1.0f, e));
  return __float_as_int(g) < 0 ? __fmul_rn(positive, e) : positive;
}

template <Activation kActivation>
__device__ __forceinline__ float activated_as_cpu(float g) {
  if constexpr (kActivation == Activation::kSilu) return times_sigmoid_as_cpu(g, g);
  const float slope = __fmaf_rn(__fmul_rn(g, g), 0.0713548162726f, 1.59576912160573f);
  return times_sigmoid_as_cpu(g, __fmul_rn(g, slope));
}

}  // namespace refit::cuda
