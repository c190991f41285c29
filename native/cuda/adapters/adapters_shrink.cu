#include "cuda/adapters/adapters_shrink.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/device/load_kernels.h"

namespace refit::cuda {
namespace {

// From so many rows on, blocks of 32 rows of x fill a GPU.
constexpr int kWideShrinkFrom = 512;
// The library's kernels for few rows take 128 multiprocessors of 132 (H100, H200) and leave no room on these. A product
// that is deeper than wide is cut along its depth, too, and then takes all of them.
constexpr int kSpare = 4;
// So many blocks one after the other, of 5 us each, take less time than a base product.
constexpr int kSpareRounds = 3;
// Blocks that fill a GPU; more of them run two at a time on a multiprocessor, with fewer loads in flight each.
constexpr int kFillingBlocks = 132;
// Up to so many clusters of eight blocks find room at once, and each block has more loads in flight than a large one.
constexpr int kMostClusters = 32;

// Clusters (tiles of A's rows of all slices, segment, part of the segment) of `Blocks` blocks. It begins early, and
// then loads A.
template <int RowTiles, int TokenTiles, int Ahead, bool Aligned, int Blocks, int BlocksPerSm>
__global__ void __launch_bounds__(kShrinkThreads / Blocks, BlocksPerSm)
    shrink_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const Element* x, int K,
                  Element* t) {
  using Block = ShrinkBlock<RowTiles, TokenTiles, Ahead, Aligned, Blocks>;
  __shared__ typename Block::Sums sums;
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int rows = min(segment.rows - static_cast<int>(blockIdx.z) * Block::kTokens, Block::kTokens);
  const int64_t first = segment.first + int64_t{blockIdx.z} * Block::kTokens;
  const int all = w.slices * w.rank, tiles = all / kShrinkRows;
  const int first_tile = static_cast<int>(blockIdx.x) / Blocks * RowTiles;
  const int g = threadIdx.x % 32 / 4;
  Block block;
  bool any = false, active[RowTiles];
#pragma unroll
  for (int i = 0; i < RowTiles; i++) {
    const int row = (first_tile + i) * kShrinkRows, slice = row / w.rank;
    active[i] = rows > 0 && first_tile + i < tiles && row - slice * w.rank < adapter_entry(w, segment.slot, slice).rank;
    any |= active[i];
    block.a[i] = active[i] ? w.a + (int64_t{segment.slot} * all + row + g) * K : nullptr;
  }
  if (!any) return wait_for_kernel_before();  // all blocks of the cluster do
  block.x = x + first * K;
#pragma unroll
  for (int j = 0; j < TokenTiles; j++) {
    const int m = j * kShrinkTokens + g;
    block.row[j] = m < rows ? m * K : -1;
  }
  Element* const to = t + first * all + first_tile * kShrinkRows;
  block.run(K, sums, wait_for_kernel_before, [&](int i, int m, int n, float sum) {
    if (m < rows && active[i]) put(to + int64_t{m} * all + i * kShrinkRows + n, sum);
  });
}

struct Shrink {
  const AdapterWeights& w;
  const AdapterSegments& s;
  const Element* x;
  int64_t K;
  Element* t;
  cudaStream_t stream;
  bool early;

  // Tiles of A in all segments, and these for so many tokens at a time.
  int tiles() const { return s.count * (w.slices * w.rank / kShrinkRows); }
  int parts(int tokens) const { return (s.most_rows + tokens - 1) / tokens; }

  template <int RowTiles, int TokenTiles, int Ahead, bool Aligned, int Blocks = 1, int BlocksPerSm = 1>
  void launch() const {
    using Block = ShrinkBlock<RowTiles, TokenTiles, Ahead, Aligned, Blocks>;
    constexpr auto kKernel = shrink_kernel<RowTiles, TokenTiles, Ahead, Aligned, Blocks, BlocksPerSm>;
    constexpr auto kName = "launch of the adapters' shrink";
    const int columns = (w.slices * w.rank / kShrinkRows + RowTiles - 1) / RowTiles;
    const dim3 grid(columns * Blocks, s.count, parts(Block::kTokens));
    const SegmentsParameter segments(s, s.count);
    const int k = static_cast<int>(K);
    if constexpr (Blocks == 1) {
      launch_early(kKernel, early, grid, Block::kThreads, stream, kName, w, segments, x, k, t);
    } else {
      launch_early_clusters(kKernel, early, Blocks, grid, Block::kThreads, stream, kName, w, segments, x, k, t);
    }
  }
};

}  // namespace

void adapter_shrink(const AdapterWeights& w, const AdapterSegments& s, const Element* x, int64_t K, Element* t,
                    cudaStream_t stream, bool beside) {
  if (s.count == 0) return;
  const bool aligned =
      K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(w.a) % 16 == 0;
  const Shrink run{w, s, x, K, t, stream, !beside};
  if (!aligned) return run.launch<1, 2, 1, false>();
  if (s.rows >= kWideShrinkFrom) return run.launch<2, 4, 2, true>();
  if (beside && s.most_rows > 2 * kShrinkTokens) return run.launch<1, 4, 3, true>();
  if (s.most_rows > kShrinkTokens) {
    if (!beside && launches_clusters() && run.tiles() * run.parts(2 * kShrinkTokens) <= kMostClusters) {
      return run.launch<1, 2, 12, true, 8>();
    }
    return run.launch<1, 2, 5, true>();
  }
  if (!beside && run.tiles() > kFillingBlocks) return run.launch<1, 1, 3, true, 1, 2>();
  run.launch<1, 1, 8, true>();
}

bool adapter_fits_beside(const AdapterWeights& w, const AdapterSegments& s, int64_t K) {
  if (s.rows >= kWideShrinkFrom || K > w.all_columns()) return false;
  const int tokens = s.most_rows <= kShrinkTokens ? kShrinkTokens : s.most_rows <= 16 ? 16 : 32;
  const int blocks = s.count * ((s.most_rows + tokens - 1) / tokens) * (w.slices * w.rank / kShrinkRows);
  return blocks <= kSpareRounds * kSpare;
}

void prepare_adapter_shrink() {
  load_kernels("loading a kernel of the adapters", shrink_kernel<1, 2, 1, false, 1, 1>,
               shrink_kernel<2, 4, 2, true, 1, 1>, shrink_kernel<1, 2, 12, true, 8, 1>,
               shrink_kernel<1, 2, 5, true, 1, 1>, shrink_kernel<1, 4, 3, true, 1, 1>,
               shrink_kernel<1, 1, 3, true, 1, 2>, shrink_kernel<1, 1, 8, true, 1, 1>);
}

}  // namespace refit::cuda
