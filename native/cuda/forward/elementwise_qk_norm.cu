// The statistics of norms over whole projections of q and k (elementwise.h): a warp for each head of a token.
//
// A sum is made head by head, and then over the heads of the model in an order that their number alone decides. So its
// bits depend neither on the number of tokens nor on the ranks that hold the heads.
#include <stdexcept>

#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/elementwise_host.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

constexpr int kSquareThreads = 256, kSquareWarps = kSquareThreads / 32;
constexpr int kPiecesEach = kSquarePieces / 2;  // of q, and of k

__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// Three elements that hold x exactly, and zeros for zero. bf16: they add up to x, with 8 bits of its mantissa each.
// fp16 lacks the range of a float: each is an integer, 11 of the bits of x.
__device__ void split(float x, Element* pieces) {
  for (int i = 0; i < kPiecesEach; ++i) {
    if constexpr (kElementType == DType::kFloat16) {
      pieces[i] = to_element(static_cast<float>(__float_as_uint(x) >> 11 * i & 0x7ffu));
    } else {
      pieces[i] = to_element(x);
      x = __fsub_rn(x, to_float(pieces[i]));
      // Infinity minus infinity is NaN; the first piece alone holds the value.
      if (!isfinite(x)) x = 0.0f;
    }
  }
}

__device__ float join(const Element* pieces) {
  if constexpr (kElementType == DType::kFloat16) {
    uint32_t bits = 0;
    for (int i = 0; i < kPiecesEach; ++i) bits |= static_cast<uint32_t>(to_float(pieces[i])) << 11 * i;
    return __uint_as_float(bits);
  }
  // The smallest first: each sum is exact.
  const float low = __fadd_rn(to_float(pieces[2]), to_float(pieces[1]));
  return __fadd_rn(low, to_float(pieces[0]));
}

// The sum of squares of one head, in all lanes of the warp.
__device__ float squares(const Element* head, int dim) {
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x % 32) * 8; i < dim; i += 32 * 8) {
    const Elements<8> values = Elements<8>::load(head + i);
    for (int e = 0; e < 8; ++e) {
      const float f = to_float(values.v[e]);
      sum = __fmaf_rn(f, f, sum);
    }
  }
  return warp_sum(sum);
}

// One block per token.
__global__ void __launch_bounds__(kSquareThreads)
    squares_kernel(const Element* qkv, int64_t ld, HeadSquares a, Element* pieces) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const Element* const row = qkv + blockIdx.x * ld;
  Element* const places = pieces + static_cast<int64_t>(blockIdx.x) * a.all_heads * kSquarePieces;
  for (int place = static_cast<int>(threadIdx.x) / 32; place < a.all_heads; place += kSquareWarps) {
    const int q = place - a.first_head, k = place - a.first_kv_head;
    float of_q = 0.0f, of_k = 0.0f;
    if (q >= 0 && q < a.heads) of_q = squares(row + static_cast<int64_t>(q) * a.head_dim, a.head_dim);
    if (k >= 0 && k < a.counted_kv_heads)
      of_k = squares(row + static_cast<int64_t>(a.heads + k) * a.head_dim, a.head_dim);
    if (threadIdx.x % 32 != 0) continue;
    split(of_q, places + place * kSquarePieces);
    split(of_k, places + place * kSquarePieces + kPiecesEach);
  }
}

// One warp for q of a token, one for k.
__global__ void __launch_bounds__(kSquareThreads) rstd_kernel(const Element* pieces, int heads, int64_t q_elements,
                                                              int64_t k_elements, float eps, int count, float* rstd) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int i = static_cast<int>(blockIdx.x) * kSquareWarps + static_cast<int>(threadIdx.x) / 32;
  if (i >= 2 * count) return;
  const int token = i / 2, part = i % 2;
  float sum = 0.0f;
  for (int head = static_cast<int>(threadIdx.x) % 32; head < heads; head += 32) {
    const int64_t place = (static_cast<int64_t>(token) * heads + head) * kSquarePieces + kPiecesEach * part;
    sum = __fadd_rn(sum, join(pieces + place));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) rstd[i] = rstd_of(sum, part == 0 ? q_elements : k_elements, eps);
}

}  // namespace

void projection_squares(const Element* qkv, int64_t ld, const HeadSquares& heads, int count, Element* pieces,
                        cudaStream_t stream) {
  if (!in_eights(ld, qkv) || heads.head_dim % 8 != 0)
    throw std::invalid_argument("projection_squares needs heads that begin at multiples of 16 bytes");
  if (count <= 0) return;
  launch_early(squares_kernel, true, count, kSquareThreads, stream, "projection_squares", qkv, ld, heads, pieces);
}

void projection_rstd(const Element* pieces, int heads, int64_t q_elements, int64_t k_elements, float eps, int count,
                     float* rstd, cudaStream_t stream) {
  if (count <= 0) return;
  const int blocks = (2 * count + kSquareWarps - 1) / kSquareWarps;
  launch_early(rstd_kernel, true, blocks, kSquareThreads, stream, "projection_rstd", pieces, heads, q_elements,
               k_elements, eps, count, rstd);
}

}  // namespace refit::cuda
