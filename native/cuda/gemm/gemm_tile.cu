#include "cuda/device/check.h"
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/gemm/gemm_tile.cuh"

namespace refit::cuda {
namespace {

// Number of tiles of rows of x that are computed before the next rows of w: blocks that run at the same time then share
// operands in L2.
constexpr unsigned kGroup = 16;

// pairs: two adjacent elements of a row of y may be stored at once.
template <class S, bool Aligned, class Out>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    tile_kernel(int64_t M, int64_t N, int K, const Element* __restrict__ x, int64_t ldx, const Element* __restrict__ w,
                const Element* __restrict__ bias, Out* __restrict__ y, int64_t ldy, unsigned tiles_m, unsigned tiles_n,
                bool pairs) {
  using Product = TileProduct<S, Aligned>;
  extern __shared__ __align__(128) uint8_t shared[];
  const unsigned group = blockIdx.x / (kGroup * tiles_n), in_group = blockIdx.x % (kGroup * tiles_n);
  const unsigned rows = min(kGroup, tiles_m - group * kGroup);
  const int64_t m0 = static_cast<int64_t>(group * kGroup + in_group % rows) * S::kM;
  const int64_t n0 = static_cast<int64_t>(in_group / rows) * S::kN;
  typename Product::Sums acc = {};
  Product::run(
      shared, [&](int r) { return x + min(m0 + r, M - 1) * ldx; }, [&](int r) { return w + min(n0 + r, N - 1) * K; }, K,
      acc);
#pragma unroll
  for (int j = 0; j < S::kNTiles; j++) {
    const int64_t n = n0 + Product::column(j);
    const bool one = n < N, two = n + 1 < N;
    const float bias0 = bias != nullptr && one ? to_float(bias[n]) : 0.0f;
    const float bias1 = bias != nullptr && two ? to_float(bias[n + 1]) : 0.0f;
#pragma unroll
    for (int i = 0; i < S::kMTiles; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t m = m0 + Product::row(i, h);
        if (m >= M) continue;
        Out* to = y + m * ldy + n;
        const float a = acc[i][j][2 * h] + bias0, b = acc[i][j][2 * h + 1] + bias1;
        if (two && pairs) {
          put_pair(to, a, b);
        } else {
          if (one) put(to, a);
          if (two) put(to + 1, b);
        }
      }
    }
  }
}

template <class S, bool Aligned, class Out>
void launch(const GemmShape& s, const Element* x, const Element* w, const Element* bias, Out* y, cudaStream_t stream) {
  const int64_t tiles_m = (s.m + S::kM - 1) / S::kM, tiles_n = (s.n + S::kN - 1) / S::kN;
  const bool pairs = s.ldy % 2 == 0 && reinterpret_cast<uintptr_t>(y) % (2 * sizeof(Out)) == 0;
  tile_kernel<S, Aligned, Out><<<static_cast<unsigned>(tiles_m * tiles_n), S::kThreads, S::kSharedBytes, stream>>>(
      s.m, s.n, static_cast<int>(s.k), x, s.ldx, w, bias, y, s.ldy, static_cast<unsigned>(tiles_m),
      static_cast<unsigned>(tiles_n), pairs);
  check_launch("launch of the tiled matrix kernel");
}

template <class S, bool Aligned, class Out>
void prepare() {
  check(
      cudaFuncSetAttribute(tile_kernel<S, Aligned, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes),
      "shared memory of the tiled matrix kernel");
}

}  // namespace

template <class Out>
void tile_gemm(const GemmShape& s, const Element* x, const Element* w, const Element* bias, Out* y, int processors,
               cudaStream_t stream) {
  const int64_t large = (s.m + LargeTile::kM - 1) / LargeTile::kM * ((s.n + LargeTile::kN - 1) / LargeTile::kN);
  if (s.k % 8 != 0 || s.ldx % 8 != 0 || !aligned(x) || !aligned(w)) {
    launch<SmallTile, false>(s, x, w, bias, y, stream);
  } else if (s.m > SmallTile::kM && large >= processors) {
    launch<LargeTile, true>(s, x, w, bias, y, stream);
  } else {
    launch<SmallTile, true>(s, x, w, bias, y, stream);
  }
}

template void tile_gemm(const GemmShape&, const Element*, const Element*, const Element*, Element*, int, cudaStream_t);
template void tile_gemm(const GemmShape&, const Element*, const Element*, const Element*, float*, int, cudaStream_t);

void prepare_tile_gemm() {
  prepare<SmallTile, false, Element>();
  prepare<SmallTile, true, Element>();
  prepare<LargeTile, true, Element>();
  prepare<SmallTile, false, float>();
  prepare<SmallTile, true, float>();
  prepare<LargeTile, true, float>();
}

}  // namespace refit::cuda
