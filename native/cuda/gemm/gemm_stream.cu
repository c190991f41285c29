#include "cuda/device/early_launch.cuh"
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/gemm/gemm_stream.cuh"

namespace refit::cuda {
namespace {

static_assert(kStreamMaxRows == kStreamMaxTiles * 8);

// Block b computes columns [16 b, 16 b + 16) of y. It begins early, and then loads w.
template <int Tiles, class Out>
__global__ void __launch_bounds__(kStreamThreads, 2)
    stream_kernel(int M, int64_t N, int K, const Element* x, int64_t ldx, const Element* __restrict__ w,
                  const Element* __restrict__ bias, Out* __restrict__ y, int64_t ldy) {
  __shared__ StreamSums<Tiles> sums;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * kStreamRows;
  StreamRows<Tiles> rows;
  // Past the last row of w it reads the last row again; those products are not stored.
  rows.w[0] = w + min(n0 + g, N - 1) * K + t * 8;
  rows.w[1] = w + min(n0 + g + 8, N - 1) * K + t * 8;
#pragma unroll
  for (int i = 0; i < Tiles; i++) rows.x[i] = i * 8 + g < M ? x + (i * 8 + g) * ldx + t * 8 : nullptr;
  stream_product<Tiles, false>(rows, K, sums, wait_for_kernel_before);
  for (int i = threadIdx.x; i < M * kStreamRows; i += kStreamThreads) {
    const int m = i / kStreamRows, n = i % kStreamRows;
    if (n0 + n >= N) continue;
    float sum = sums.total(m, n);
    if (bias != nullptr) sum += to_float(bias[n0 + n]);
    put(y + m * ldy + n0 + n, sum);
  }
}

template <int Tiles, class Out>
void launch(const GemmShape& s, const Element* x, const Element* w, const Element* bias, Out* y, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((s.n + kStreamRows - 1) / kStreamRows);
  launch_early(stream_kernel<Tiles, Out>, true, blocks, kStreamThreads, stream, "launch of the streaming matrix kernel",
               static_cast<int>(s.m), s.n, static_cast<int>(s.k), x, s.ldx, w, bias, y, s.ldy);
}

template <int Tiles, class Out>
void prepare() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, stream_kernel<Tiles, Out>), "loading the streaming matrix kernel");
}

}  // namespace

bool stream_takes(const GemmShape& s, const Element* x, const Element* w) {
  return s.m <= kStreamMaxRows && s.k % 8 == 0 && s.ldx % 8 == 0 && aligned(x) && aligned(w);
}

template <class Out>
void stream_gemm(const GemmShape& shape, const Element* x, const Element* w, const Element* bias, Out* y,
                 cudaStream_t stream) {
  if (shape.m <= 8) {
    launch<1>(shape, x, w, bias, y, stream);
  } else {
    launch<2>(shape, x, w, bias, y, stream);
  }
}

template void stream_gemm(const GemmShape&, const Element*, const Element*, const Element*, Element*, cudaStream_t);
template void stream_gemm(const GemmShape&, const Element*, const Element*, const Element*, float*, cudaStream_t);

void prepare_stream_gemm() {
  prepare<1, Element>();
  prepare<2, Element>();
  prepare<1, float>();
  prepare<2, float>();
}

}  // namespace refit::cuda
