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

__device__ __forceinline__ float add(float residual, float delta) { return round_element(residual + delta); }

__device__ __forceinline__ Element scaled(float x, float rstd, Element weight, bool round_once) {
  const float unit = __fmul_rn(x, rstd);
  return to_element(__fmul_rn(round_once ? unit : round_element(unit), to_float(weight)));
}

struct NormArgs {
  Element* x;           // residual, or what is normed
  const int32_t* rows;  // row of x for each row of out; null: the same
  const Element* delta;
  const Element* bias;
  const Element* weight;
  Element* out;
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
  Elements<8> h[V], weight[V];
  float sum = 0.0f;
  // Weights are loaded before the wait: in a decode step they are not in the cache.
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (a.weight != nullptr && i < a.hidden) weight[v] = Elements<8>::load(a.weight + i);
  }
  wait_for_kernel_before();
  Element* x = a.x + (a.rows != nullptr ? a.rows[row] : row) * a.hidden;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    h[v] = Elements<8>::load(x + i);
    if (a.delta != nullptr) {
      const Elements<8> delta = Elements<8>::load(a.delta + row * a.hidden + i);
      Elements<8> bias;
      if (a.bias != nullptr) bias = Elements<8>::load(a.bias + i);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float d = to_float(delta.v[e]);
        if (a.bias != nullptr) d = add(d, to_float(bias.v[e]));
        h[v].v[e] = to_element(kPost ? d : to_float(h[v].v[e]) + d);
      }
      if (!kPost) h[v].store(x + i);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float f = to_float(h[v].v[e]);
      sum = __fmaf_rn(f, f, sum);
    }
  }
  if (a.weight == nullptr) return;
  const float rstd = rstd_of(block_sum(sum, shared), a.hidden, a.eps);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    Elements<8> y, residual;
    if (kPost) residual = Elements<8>::load(x + i);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      y.v[e] = scaled(to_float(h[v].v[e]), rstd, weight[v].v[e], a.round_once);
      if (kPost) y.v[e] = to_element(to_float(residual.v[e]) + to_float(y.v[e]));
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
  Element* x = a.x + (a.rows != nullptr ? a.rows[row] : row) * a.hidden;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) {
    float f = to_float(x[i]);
    if (a.delta != nullptr) {
      float d = to_float(a.delta[row * a.hidden + i]);
      if (a.bias != nullptr) d = add(d, to_float(a.bias[i]));
      f = kPost ? d : add(f, d);
      if (!kPost) x[i] = to_element(f);
    }
    sum = __fmaf_rn(f, f, sum);
  }
  if (a.weight == nullptr) return;
  const float rstd = rstd_of(block_sum(sum, shared), a.hidden, a.eps);
  for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) {
    float f = to_float(x[i]);
    if (kPost) {
      f = to_float(a.delta[row * a.hidden + i]);
      if (a.bias != nullptr) f = add(f, to_float(a.bias[i]));
    }
    const Element y = scaled(f, rstd, a.weight[i], a.round_once);
    if (kPost) {
      x[i] = to_element(to_float(x[i]) + to_float(y));
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

void add_norm(Element* residual, const Element* delta, const Element* bias, const Element* weight, float eps, int count,
              int hidden, Element* normed, cudaStream_t stream, bool round_once) {
  if (count <= 0 || (delta == nullptr && weight == nullptr)) return;
  launch<false>({residual, nullptr, delta, bias, weight, normed, hidden, eps, round_once}, count, stream, "add_norm");
}

void norm_add(Element* residual, const Element* delta, const Element* bias, const Element* weight, float eps, int count,
              int hidden, cudaStream_t stream, bool round_once) {
  if (count <= 0) return;
  launch<true>({residual, nullptr, delta, bias, weight, nullptr, hidden, eps, round_once}, count, stream, "norm_add");
}

void norm_rows(const Element* x, const int32_t* rows, int count, const Element* weight, float eps, int hidden,
               Element* out, cudaStream_t stream, bool round_once) {
  if (count <= 0) return;
  // Without a delta x is only read.
  launch<false>({const_cast<Element*>(x), rows, nullptr, nullptr, weight, out, hidden, eps, round_once}, count, stream,
                "norm_rows");
}

}  // namespace refit::cuda
