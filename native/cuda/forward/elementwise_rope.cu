// Norm of q and k, RoPE, and the store into the KV cache, in one pass over qkv.
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/elementwise_host.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

constexpr int kRopeThreads = 128;

struct RopeArgs {
  Element* qkv;
  HeadNorms norms;
  const float* rope;
  const int32_t* positions;
  const int32_t* slots;
  int count, heads;
  KvLayer kv;
  bool round_once;
};

__device__ __forceinline__ float product(float x, float y, bool round_once) {
  return round_once ? __fmul_rn(x, y) : round_element(__fmul_rn(x, y));
}

// 1 << lanes_shift threads (at most 32) compute one head of one token; a thread has N adjacent elements of the lower
// half and the same ones of the upper half.
template <int N>
__global__ void __launch_bounds__(kRopeThreads) rope_and_cache_kernel(RopeArgs a, int lanes_shift) {
  let_next_kernel_begin();
  const int dim = a.kv.head_dim, half = dim / 2, per_token = a.heads + 2 * a.kv.kv_heads;
  const int lanes = 1 << lanes_shift;
  const int unit = static_cast<int>((blockIdx.x * kRopeThreads + threadIdx.x) >> lanes_shift);
  const int token = unit / per_token, head = unit - token * per_token;
  const int i = (static_cast<int>(threadIdx.x) & (lanes - 1)) * N;
  // Threads without work stay, because shuffles need whole warps.
  const bool active = token < a.count && i < half;
  const bool is_v = head >= a.heads + a.kv.kv_heads, is_k = !is_v && head >= a.heads;
  Element* at = a.qkv + static_cast<int64_t>(unit) * dim + i;

  // All loads come first, so that those behind a position or slot do not also wait for the norm; weights before the
  // kernel before has ended.
  Elements<N> low, high, weight_low, weight_high;
  alignas(16) float cos[N], sin[N];
  for (int e = 0; e < N; ++e) low.v[e] = high.v[e] = Element(0.0f);
  const Element* norm = is_v ? nullptr : is_k ? a.norms.k : a.norms.q;
  const bool is_whole = a.norms.rstd != nullptr;
  if (norm != nullptr && is_whole) norm += static_cast<int64_t>(is_k ? head - a.heads : head) * dim;
  int slot = 0;
  if (active && norm != nullptr) {
    weight_low = Elements<N>::load(norm + i);
    weight_high = Elements<N>::load(norm + half + i);
  }
  wait_for_kernel_before();
  if (active) {
    low = Elements<N>::load(at);
    high = Elements<N>::load(at + half);
    if (head >= a.heads) slot = a.slots[token];
    if (!is_v) {
      const float* angle = a.rope + static_cast<int64_t>(a.positions[token]) * dim + i;
      for (int e = 0; e < N; e += 4) {
        *reinterpret_cast<float4*>(cos + e) = *reinterpret_cast<const float4*>(angle + e);
        *reinterpret_cast<float4*>(sin + e) = *reinterpret_cast<const float4*>(angle + half + e);
      }
    }
  }
  if (a.norms.q != nullptr || a.norms.k != nullptr) {
    float sum = 0.0f;
    for (int e = 0; e < N && !is_whole; ++e) {
      const float l = to_float(low.v[e]), h = to_float(high.v[e]);
      sum = __fmaf_rn(h, h, __fmaf_rn(l, l, sum));
    }
    for (int mask = lanes / 2; mask > 0 && !is_whole; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (norm != nullptr && active) {
      const float rstd = is_whole ? a.norms.rstd[2 * token + (is_k ? 1 : 0)] : rstd_of(sum, dim, a.norms.eps);
      for (int e = 0; e < N; ++e) {
        float l = __fmul_rn(to_float(low.v[e]), rstd), h = __fmul_rn(to_float(high.v[e]), rstd);
        if (!a.round_once) l = round_element(l), h = round_element(h);
        low.v[e] = to_element(__fmul_rn(l, to_float(weight_low.v[e])));
        high.v[e] = to_element(__fmul_rn(h, to_float(weight_high.v[e])));
      }
    }
  }
  if (!active) return;

  if (!is_v) {
    for (int e = 0; e < N; ++e) {
      const float l = to_float(low.v[e]), h = to_float(high.v[e]);
      // Hugging Face's x * cos + rotate_half(x) * sin: two rounded products, then the rounded sum.
      low.v[e] = to_element(__fadd_rn(product(l, cos[e], a.round_once), product(-h, sin[e], a.round_once)));
      high.v[e] = to_element(__fadd_rn(product(h, cos[e], a.round_once), product(l, sin[e], a.round_once)));
    }
    low.store(at);
    high.store(at + half);
  }
  if (head >= a.heads && slot >= 0) {
    const int page = slot / a.kv.page_size;
    const int kv_head = head - a.heads - (is_v ? a.kv.kv_heads : 0);
    const int64_t row =
        (static_cast<int64_t>(page) * a.kv.kv_heads + kv_head) * a.kv.page_size + (slot - page * a.kv.page_size);
    Element* to = (is_v ? a.kv.v : a.kv.k) + row * dim + i;
    low.store(to);
    high.store(to + half);
  }
}

template <int N>
void launch(const RopeArgs& a, cudaStream_t stream) {
  int lanes_shift = 0;
  while ((N << lanes_shift) < a.kv.head_dim / 2) lanes_shift++;
  const int64_t threads = static_cast<int64_t>(a.count) * (a.heads + 2 * a.kv.kv_heads) << lanes_shift;
  // Indices of threads are 32 bits wide in the kernel.
  if (threads > std::numeric_limits<int>::max() - kRopeThreads) {
    throw std::invalid_argument("rope_and_cache: " + std::to_string(a.count) + " tokens are too many for one launch");
  }
  const int64_t blocks = (threads + kRopeThreads - 1) / kRopeThreads;
  launch_early(rope_and_cache_kernel<N>, true, static_cast<unsigned>(blocks), kRopeThreads, stream, "rope_and_cache", a,
               lanes_shift);
}

}  // namespace

void rope_and_cache(Element* qkv, const HeadNorms& norms, const float* rope, const int32_t* positions,
                    const int32_t* slots, int count, int heads, const KvLayer& kv, cudaStream_t stream,
                    bool round_once) {
  if (kv.head_dim < 8 || kv.head_dim % 8 != 0 || kv.head_dim > 256) {
    throw std::invalid_argument("rope_and_cache: head_dim is " + std::to_string(kv.head_dim) +
                                ", expected a multiple of 8 up to 256");
  }
  if (count <= 0) return;
  const RopeArgs a{qkv, norms, rope, positions, slots, count, heads, kv, round_once};
  // The number of columns is any multiple of 8: only the addresses matter here.
  if (!in_eights(0, qkv, norms.q, norms.k, rope, kv.k, kv.v)) {
    throw std::invalid_argument("rope_and_cache: a buffer does not begin at a multiple of 16 bytes");
  }
  // Both halves of a head begin at a multiple of the vector.
  if (kv.head_dim % 16 == 0) {
    launch<8>(a, stream);
  } else {
    launch<4>(a, stream);
  }
}

}  // namespace refit::cuda
