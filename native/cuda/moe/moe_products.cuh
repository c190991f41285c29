// The two products of an expert, for all kernels that compute them: their operands, which rows of w make a column of
// y, and how a sum becomes an element.
#pragma once
#include "cuda/gemm/gemm_mma.cuh"
#include "cuda/moe/moe_kernels.h"

namespace refit::cuda {

// x: rows of K elements; row i of an expert is x[from[slot]], or x[slot] if `from` is null.
struct Experts {
  const RowTile* tiles;
  const int32_t* tile_count;
  const Element* x;
  const int32_t* from;
  const Element* w;
  int N, K;  // of one expert: number of columns, and of products for each
  Activation activation;
  const float* delta = nullptr;  // [slots, 2 N]: the adapters' part of gate and up; only AdaptedGateUp reads it
};

// g * sigmoid(t) for t of g's sign: g / (1 + e^-t). From t < -87 on the result is a zero. The approximations of e^x
// and 1 / x err by at most 2^-18 of the value, the result is rounded to 2^-9 (bf16) or 2^-12.
__device__ __forceinline__ float activated(float g, Activation activation) {
  constexpr float kLog2E = 1.44269504f;
  const float t = activation == Activation::kSilu ? g : g * fmaf(g * g, 0.0713548162726f, 1.59576912160573f);
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * t));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return g * inverse;
}

// Gate and up projection in one. An expert has 2 N rows of w: first the gate's, then up's. y [slots, N] is
// activation(gate) * up, rounded where Hugging Face's 16-bit module holds tensors. Rows of w are taken in eights: eight
// of the gate, the same eight of up, and so on, so a thread has both sums of a column.
struct GateUp {
  using Out = Element;
  static constexpr int kRowsPerColumn = 2;
  static constexpr bool kDelta = false;
  static __device__ __forceinline__ int64_t w_row(int64_t expert, int n0, int r, int N) {
    const int n = min(n0 + r / 16 * 8 + r % 8, N - 1);
    return (expert * 2 + r / 8 % 2) * N + n;
  }
  static __device__ __forceinline__ float finish(float gate, float up, Activation activation) {
    return round_element(activated(round_element(gate), activation)) * round_element(up);
  }
};

// The same with the adapters' part added to both sums.
struct AdaptedGateUp : GateUp {
  static constexpr bool kDelta = true;
};

template <class Kind>
__device__ __forceinline__ float finished(const Experts& e, int64_t slot, int n, float gate, float up) {
  if constexpr (Kind::kDelta) {
    const float* const delta = e.delta + slot * 2 * e.N + n;
    gate += delta[0];
    up += delta[e.N];
  }
  return Kind::finish(gate, up, e.activation);
}

// Down projection: N rows of w, y [slots, N].
template <class Result>
struct Down {
  using Out = Result;
  static constexpr int kRowsPerColumn = 1;
  static __device__ __forceinline__ int64_t w_row(int64_t expert, int n0, int r, int N) {
    return expert * N + min(n0 + r, N - 1);
  }
};

// The products of `count` tokens by wgmma (moe_gemm_hopper.cu).
template <class Kind>
void wgmma_experts(const Experts& e, const MoeShape& shape, typename Kind::Out* y, int64_t count,
                   const ExpertLaunch& by, cudaStream_t stream);

}  // namespace refit::cuda
