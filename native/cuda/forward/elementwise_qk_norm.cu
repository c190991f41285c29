// The statistics of norms over whole projections of q and k (elementwise.h): one block per token.
//
// The number of threads depends only on the width, so a token's bits do not depend on the number of tokens.
#include <algorithm>

#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/elementwise_host.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

constexpr int kMaxSquareThreads = 512;

struct SquareArgs {
  const bf16* qkv;
  int64_t ld, q_cols, k_cols;
  bool counts_k;
  int rank, ranks;
  bf16* pieces;
};

// Bf16 pieces that add up to x exactly: 8 bits of its mantissa each.
__device__ void split(float x, bf16* pieces) {
  for (int i = 0; i < 3; ++i) {
    pieces[i] = __float2bfloat16_rn(x);
    x = __fsub_rn(x, __bfloat162float(pieces[i]));
    // Infinity minus infinity is NaN; the first piece alone holds the value.
    if (!isfinite(x)) x = 0.0f;
  }
}

// Sum of squares of x [n] over the block. N elements at a time.
template <int N>
__device__ float squares(const bf16* x, int64_t n, float* shared) {
  float sum = 0.0f;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * N; i < n; i += static_cast<int64_t>(blockDim.x) * N) {
    const Bf16s<N> values = Bf16s<N>::load(x + i);
    for (int e = 0; e < N; ++e) {
      const float f = __bfloat162float(values.v[e]);
      sum = __fmaf_rn(f, f, sum);
    }
  }
  const float total = block_sum(sum, shared);
  __syncthreads();  // before `shared` is used again
  return total;
}

template <int N>
__global__ void __launch_bounds__(kMaxSquareThreads) squares_kernel(SquareArgs a) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ float shared[32];
  const bf16* q = a.qkv + blockIdx.x * a.ld;
  const float of_q = squares<N>(q, a.q_cols, shared);
  const float of_k = a.counts_k ? squares<N>(q + a.q_cols, a.k_cols, shared) : 0.0f;
  bf16* row = a.pieces + static_cast<int64_t>(blockIdx.x) * a.ranks * kSquarePieces;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= a.ranks) return;
  bf16* place = row + rank * kSquarePieces;
  split(rank == a.rank ? of_q : 0.0f, place);
  split(rank == a.rank ? of_k : 0.0f, place + 3);
}

__global__ void rstd_kernel(const bf16* pieces, int ranks, int64_t q_elements, int64_t k_elements, float eps, int count,
                            float* rstd) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= 2 * count) return;
  const int token = i / 2, part = i % 2;
  float sum = 0.0f;
  for (int rank = 0; rank < ranks; ++rank) {
    const bf16* place = pieces + (static_cast<int64_t>(token) * ranks + rank) * kSquarePieces + 3 * part;
    // The smallest first: each sum is exact.
    const float low = __fadd_rn(__bfloat162float(place[2]), __bfloat162float(place[1]));
    sum = __fadd_rn(sum, __fadd_rn(low, __bfloat162float(place[0])));
  }
  rstd[i] = rstd_of(sum, part == 0 ? q_elements : k_elements, eps);
}

}  // namespace

void projection_squares(const bf16* qkv, int64_t ld, int64_t q_cols, int64_t k_cols, bool counts_k, int rank, int ranks,
                        int count, bf16* pieces, cudaStream_t stream) {
  if (count <= 0) return;
  const SquareArgs a{qkv, ld, q_cols, k_cols, counts_k, rank, ranks, pieces};
  const bool eights = in_eights(ld, qkv) && q_cols % 8 == 0 && k_cols % 8 == 0;
  const int64_t vectors = eights ? q_cols / 8 : q_cols;
  const int threads = static_cast<int>(std::clamp<int64_t>((vectors + 31) / 32 * 32, 32, kMaxSquareThreads));
  launch_early(eights ? squares_kernel<8> : squares_kernel<1>, true, count, threads, stream, "projection_squares", a);
}

void projection_rstd(const bf16* pieces, int ranks, int64_t q_elements, int64_t k_elements, float eps, int count,
                     float* rstd, cudaStream_t stream) {
  if (count <= 0) return;
  constexpr int kThreads = 128;
  const int blocks = (2 * count + kThreads - 1) / kThreads;
  launch_early(rstd_kernel, true, blocks, kThreads, stream, "projection_rstd", pieces, ranks, q_elements, k_elements,
               eps, count, rstd);
}

}  // namespace refit::cuda
