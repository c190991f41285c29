// RMSNorm with the residual sum before it, after it, or without one: one block per row.
//
// The number of threads depends only on the width, so a row's bits do not depend on the number of rows.
#include <algorithm>

#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/elementwise_host.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

constexpr int kMaxThreads = 512;

__device__ __forceinline__ float add(float residual, float delta) { return rounded_bf16(residual + delta); }

__device__ __forceinline__ bf16 scaled(float x, float rstd, bf16 weight, bool round_once) {
  const float unit = __fmul_rn(x, rstd);
  return __float2bfloat16_rn(__fmul_rn(round_once ? unit : rounded_bf16(unit), __bfloat162float(weight)));
}

struct NormArgs {
  bf16* x;              // residual, or what is normed
  const int32_t* rows;  // row of x for each row of out; null: the same
  const bf16* delta;
  const bf16* bias;
  const bf16* weight;
  bf16* out;
  int hidden;
  float eps;
  bool round_once;
};

// The row stays in registers: at most V vectors of 8 a thread. kPost: x += norm(delta + bias), and `out` is not used.
template <int V, bool kPost>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(NormArgs a) {
  let_next_kernel_begin();
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  Bf16s<8> h[V], weight[V];
  float sum = 0.0f;
  // Weights are loaded before the wait: in a decode step they are not in the cache.
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (a.weight != nullptr && i < a.hidden) weight[v] = Bf16s<8>::load(a.weight + i);
  }
  wait_for_kernel_before();
  bf16* x = a.x + (a.rows != nullptr ? a.rows[row] : row) * a.hidden;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    h[v] = Bf16s<8>::load(x + i);
    if (a.delta != nullptr) {
      const Bf16s<8> delta = Bf16s<8>::load(a.delta + row * a.hidden + i);
      Bf16s<8> bias;
      if (a.bias != nullptr) bias = Bf16s<8>::load(a.bias + i);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float d = __bfloat162float(delta.v[e]);
        if (a.bias != nullptr) d = add(d, __bfloat162float(bias.v[e]));
        h[v].v[e] = __float2bfloat16_rn(kPost ? d : __bfloat162float(h[v].v[e]) + d);
      }
      if (!kPost) h[v].store(x + i);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float f = __bfloat162float(h[v].v[e]);
      sum = __fmaf_rn(f, f, sum);
    }
  }
  if (a.weight == nullptr) return;
  const float rstd = rstd_of(block_sum(sum, shared), a.hidden, a.eps);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    Bf16s<8> y, residual;
    if (kPost) residual = Bf16s<8>::load(x + i);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      y.v[e] = scaled(__bfloat162float(h[v].v[e]), rstd, weight[v].v[e], a.round_once);
      if (kPost) y.v[e] = __float2bfloat16_rn(__bfloat162float(residual.v[e]) + __bfloat162float(y.v[e]));
    }
    y.store((kPost ? x : a.out + row * a.hidden) + i);
  }
}

// Any width and alignment: the row is read twice, each element by the thread that wrote it.
template <bool kPost>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel_any(NormArgs a) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  bf16* x = a.x + (a.rows != nullptr ? a.rows[row] : row) * a.hidden;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) {
    float f = __bfloat162float(x[i]);
    if (a.delta != nullptr) {
      float d = __bfloat162float(a.delta[row * a.hidden + i]);
      if (a.bias != nullptr) d = add(d, __bfloat162float(a.bias[i]));
      f = kPost ? d : add(f, d);
      if (!kPost) x[i] = __float2bfloat16_rn(f);
    }
    sum = __fmaf_rn(f, f, sum);
  }
  if (a.weight == nullptr) return;
  const float rstd = rstd_of(block_sum(sum, shared), a.hidden, a.eps);
  for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) {
    float f = __bfloat162float(x[i]);
    if (kPost) {
      f = __bfloat162float(a.delta[row * a.hidden + i]);
      if (a.bias != nullptr) f = add(f, __bfloat162float(a.bias[i]));
    }
    const bf16 y = scaled(f, rstd, a.weight[i], a.round_once);
    if (kPost) {
      x[i] = __float2bfloat16_rn(__bfloat162float(x[i]) + __bfloat162float(y));
    } else {
      a.out[row * a.hidden + i] = y;
    }
  }
}

template <bool kPost>
void launch(const NormArgs& a, int count, cudaStream_t stream, const char* name) {
  const bool eights = in_eights(a.hidden, a.x, a.delta, a.bias, a.weight, a.out);
  const int64_t vectors = eights ? a.hidden / 8 : a.hidden;
  const int threads = static_cast<int>(std::clamp<int64_t>((vectors + 31) / 32 * 32, 32, kMaxThreads));
  const int64_t each = (vectors + threads - 1) / threads;
  auto* kernel = norm_kernel_any<kPost>;
  if (eights && each <= 4)
    kernel = each == 1 ? norm_kernel<1, kPost> : each == 2 ? norm_kernel<2, kPost> : norm_kernel<4, kPost>;
  launch_early(kernel, true, count, threads, stream, name, a);
}

}  // namespace

void add_norm(bf16* residual, const bf16* delta, const bf16* bias, const bf16* weight, float eps, int count, int hidden,
              bf16* normed, cudaStream_t stream, bool round_once) {
  if (count <= 0 || (delta == nullptr && weight == nullptr)) return;
  launch<false>({residual, nullptr, delta, bias, weight, normed, hidden, eps, round_once}, count, stream, "add_norm");
}

void norm_add(bf16* residual, const bf16* delta, const bf16* bias, const bf16* weight, float eps, int count, int hidden,
              cudaStream_t stream, bool round_once) {
  if (count <= 0) return;
  launch<true>({residual, nullptr, delta, bias, weight, nullptr, hidden, eps, round_once}, count, stream, "norm_add");
}

void norm_rows(const bf16* x, const int32_t* rows, int count, const bf16* weight, float eps, int hidden, bf16* out,
               cudaStream_t stream, bool round_once) {
  if (count <= 0) return;
  // Without a delta x is only read.
  launch<false>({const_cast<bf16*>(x), rows, nullptr, nullptr, weight, out, hidden, eps, round_once}, count, stream,
                "norm_rows");
}

}  // namespace refit::cuda
