// The experts' products: the same cores as for plain matrices, once for each row tile of the list that the GPU made.
#include "cuda/device/early_launch.cuh"
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/gemm/gemm_stream.cuh"
#include "cuda/gemm/gemm_tile.cuh"
#include "cuda/moe/moe_products.cuh"

namespace refit::cuda {
namespace {

// Blocks (column tile, row tile); a row tile has at most 8 * Tiles rows.
template <class Kind, int Tiles, bool OneRun>
__global__ void __launch_bounds__(kStreamThreads, OneRun ? 4 / Tiles : 2)
    stream_experts(Experts e, typename Kind::Out* __restrict__ y) {
  constexpr int kColumns = kStreamRows / Kind::kRowsPerColumn;
  __shared__ StreamSums<Tiles> sums;
  wait_for_kernel_before();
  // Both are requested at once; a tile past the last one is uninitialised and not used.
  const RowTile tile = e.tiles[blockIdx.y];
  if (static_cast<int>(blockIdx.y) >= *e.tile_count) return;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int n0 = blockIdx.x * kColumns;
  StreamRows<Tiles> rows;
  rows.w[0] = e.w + Kind::w_row(tile.expert, n0, g, e.N) * e.K + t * 8;
  rows.w[1] = e.w + Kind::w_row(tile.expert, n0, g + 8, e.N) * e.K + t * 8;
#pragma unroll
  for (int i = 0; i < Tiles; i++) {
    const int m = i * 8 + g;
    rows.x[i] = nullptr;
    if (m < tile.rows) {
      const int64_t slot = tile.first + m;
      rows.x[i] = e.x + (e.from != nullptr ? e.from[slot] : slot) * e.K + t * 8;
    }
  }
  stream_product<Tiles, OneRun>(rows, e.K, sums, [] {});
  for (int i = threadIdx.x; i < tile.rows * kColumns; i += kStreamThreads) {
    const int m = i / kColumns, n = i % kColumns;
    if (n0 + n >= e.N) continue;
    float value = sums.total(m, n);
    if constexpr (Kind::kRowsPerColumn == 2)
      value = finished<Kind>(e, tile.first + m, n0 + n, value, sums.total(m, n + 8));
    put(y + static_cast<int64_t>(tile.first + m) * e.N + n0 + n, value);
  }
}

// Blocks (column tile, row tile); a row tile has at most S::kM rows. pairs: two adjacent elements of y may be stored at
// once.
template <class Kind, class S, bool Aligned>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    tile_experts(Experts e, typename Kind::Out* __restrict__ y, bool pairs) {
  using Product = TileProduct<S, Aligned>;
  extern __shared__ __align__(128) uint8_t shared[];
  const RowTile tile = e.tiles[blockIdx.y];
  if (static_cast<int>(blockIdx.y) >= *e.tile_count) return;
  const int n0 = blockIdx.x * (S::kN / Kind::kRowsPerColumn);
  typename Product::Sums acc = {};
  Product::run(
      shared,
      [&](int r) {
        const int64_t slot = tile.first + min(r, tile.rows - 1);
        return e.x + (e.from != nullptr ? e.from[slot] : slot) * e.K;
      },
      [&](int r) { return e.w + Kind::w_row(tile.expert, n0, r, e.N) * e.K; }, e.K, acc);
#pragma unroll
  for (int j = 0; j < S::kNTiles; j += Kind::kRowsPerColumn) {
    // With two rows of w per column, tiles of eight alternate: the columns of an even tile are at half its place.
    const int r = Product::column(j);
    const int n = n0 + (Kind::kRowsPerColumn == 2 ? r / 16 * 8 + r % 8 : r);
#pragma unroll
    for (int i = 0; i < S::kMTiles; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = Product::row(i, h);
        if (m >= tile.rows || n >= e.N) continue;
        float a = acc[i][j][2 * h], b = acc[i][j][2 * h + 1];
        if constexpr (Kind::kRowsPerColumn == 2) {
          a = finished<Kind>(e, tile.first + m, n, a, acc[i][j + 1][2 * h]);
          b = finished<Kind>(e, tile.first + m, min(n + 1, e.N - 1), b, acc[i][j + 1][2 * h + 1]);
        }
        typename Kind::Out* to = y + static_cast<int64_t>(tile.first + m) * e.N + n;
        if (pairs) {
          put_pair(to, a, b);
        } else {
          put(to, a);
          if (n + 1 < e.N) put(to + 1, b);
        }
      }
    }
  }
}

template <class Kind, int Tiles>
void launch_stream(const Experts& e, typename Kind::Out* y, int64_t row_tiles, cudaStream_t stream) {
  constexpr int kColumns = kStreamRows / Kind::kRowsPerColumn;
  const dim3 grid((e.N + kColumns - 1) / kColumns, static_cast<unsigned>(row_tiles));
  launch_early(e.K > kStreamOneRun ? stream_experts<Kind, Tiles, false> : stream_experts<Kind, Tiles, true>, true, grid,
               kStreamThreads, stream, "launch of the experts' streaming kernel", e, y);
}

template <class Kind, class S, bool Aligned>
void launch_tile(const Experts& e, typename Kind::Out* y, int64_t row_tiles, cudaStream_t stream) {
  constexpr int kColumns = S::kN / Kind::kRowsPerColumn;
  const dim3 grid((e.N + kColumns - 1) / kColumns, static_cast<unsigned>(row_tiles));
  tile_experts<Kind, S, Aligned><<<grid, S::kThreads, S::kSharedBytes, stream>>>(e, y, e.N % 2 == 0);
  check_launch("launch of the experts' tiled kernel");
}

template <class Kind>
void launch(const Experts& e, const MoeShape& shape, typename Kind::Out* y, int64_t count, const ExpertLaunch& by,
            cudaStream_t stream) {
  if (by.kernel == ExpertKernel::kWgmma64 || by.kernel == ExpertKernel::kWgmma256)
    return wgmma_experts<Kind>(e, shape, y, count, by, stream);
  const int64_t row_tiles = max_row_tiles(count * shape.per_token, shape.experts, rows_of(by.kernel));
  switch (by.kernel) {
    case ExpertKernel::kStream8:
      return launch_stream<Kind, 1>(e, y, row_tiles, stream);
    case ExpertKernel::kStream16:
      return launch_stream<Kind, 2>(e, y, row_tiles, stream);
    case ExpertKernel::kTile128:
      return launch_tile<Kind, LargeTile, true>(e, y, row_tiles, stream);
    default:
      break;
  }
  if (e.K % 8 == 0 && aligned(e.x) && aligned(e.w)) {
    launch_tile<Kind, SmallTile, true>(e, y, row_tiles, stream);
  } else {
    launch_tile<Kind, SmallTile, false>(e, y, row_tiles, stream);
  }
}

template <class Kind>
void prepare() {
  cudaFuncAttributes attributes;
  for (auto* kernel : {stream_experts<Kind, 1, false>, stream_experts<Kind, 1, true>, stream_experts<Kind, 2, false>,
                       stream_experts<Kind, 2, true>}) {
    check(cudaFuncGetAttributes(&attributes, kernel), "loading the experts' streaming kernel");
  }
  const auto allow = [](auto kernel, int bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory of the experts' tiled kernel");
  };
  allow(tile_experts<Kind, SmallTile, false>, SmallTile::kSharedBytes);
  allow(tile_experts<Kind, SmallTile, true>, SmallTile::kSharedBytes);
  allow(tile_experts<Kind, LargeTile, true>, LargeTile::kSharedBytes);
}

}  // namespace

bool moe_rows_aligned(const MoeShape& shape, const Element* x, const Element* w13, const Element* w2) {
  return shape.hidden % 8 == 0 && shape.outputs() % 8 == 0 && shape.inter % 8 == 0 && aligned(x) && aligned(w13) &&
         aligned(w2);
}

void expert_gate_up(const MoeShape& shape, const MoeScratch& scratch, const Element* x, const Element* w13,
                    int64_t count, const ExpertLaunch& by, cudaStream_t stream, bool adapted) {
  const Experts e{scratch.tiles,
                  scratch.tile_count,
                  x,
                  scratch.tokens,
                  w13,
                  static_cast<int>(shape.inter),
                  static_cast<int>(shape.hidden),
                  shape.activation,
                  scratch.delta};
  if (adapted) {
    launch<AdaptedGateUp>(e, shape, scratch.act, count, by, stream);
  } else {
    launch<GateUp>(e, shape, scratch.act, count, by, stream);
  }
}

void expert_down(const MoeShape& shape, const MoeScratch& scratch, const Element* w2, int64_t count, bool partial,
                 const ExpertLaunch& by, cudaStream_t stream) {
  const Experts e{scratch.tiles,
                  scratch.tile_count,
                  scratch.act,
                  nullptr,
                  w2,
                  static_cast<int>(shape.outputs()),
                  static_cast<int>(shape.depth()),
                  shape.activation};
  if (partial) {
    launch<Down<float>>(e, shape, static_cast<float*>(scratch.out), count, by, stream);
  } else {
    launch<Down<Element>>(e, shape, static_cast<Element*>(scratch.out), count, by, stream);
  }
}

void prepare_moe_gemm() {
  prepare<GateUp>();
  prepare<AdaptedGateUp>();
  prepare<Down<Element>>();
  prepare<Down<float>>();
}

}  // namespace refit::cuda
