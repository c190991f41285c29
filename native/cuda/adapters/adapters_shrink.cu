#include "cuda/adapters/adapters_shrink.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"

namespace refit::cuda {
namespace {

// From so many rows on, blocks of 32 rows of x fill a GPU.
constexpr int kWideFrom = 512;
// The library's kernels for few rows take 128 multiprocessors of 132 (H100, H200) and leave no room on these.
constexpr int kSpare = 4;
// So many blocks one after the other, of 5 us each, take less time than a base product.
constexpr int kSpareRounds = 3;
// Blocks that fill a GPU; more of them run two at a time on a multiprocessor, with fewer loads in flight each.
constexpr int kFillingBlocks = 132;

// Blocks (tiles of A's rows of all slices, segment, part of the segment). It begins early, and then loads A.
template <int RowTiles, int TokenTiles, int Ahead, bool Aligned, int BlocksPerSm>
__global__ void __launch_bounds__(kShrinkThreads, BlocksPerSm)
    shrink_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const bf16* x, int K, bf16* t) {
  using Block = ShrinkBlock<RowTiles, TokenTiles, Ahead, Aligned>;
  __shared__ typename Block::Sums sums;
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int rows = min(segment.rows - static_cast<int>(blockIdx.z) * Block::kTokens, Block::kTokens);
  const int64_t first = segment.first + int64_t{blockIdx.z} * Block::kTokens;
  const int all = w.slices * w.rank, tiles = all / kShrinkRows, first_tile = static_cast<int>(blockIdx.x) * RowTiles;
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
  if (!any) return wait_for_kernel_before();
  block.x = x + first * K;
#pragma unroll
  for (int j = 0; j < TokenTiles; j++) {
    const int m = j * kShrinkTokens + g;
    block.row[j] = m < rows ? m * K : -1;
  }
  bf16* const to = t + first * all + first_tile * kShrinkRows;
  block.run(K, sums, wait_for_kernel_before, [&](int i, int m, int n, float sum) {
    if (m < rows && active[i]) put(to + int64_t{m} * all + i * kShrinkRows + n, sum);
  });
}

template <int RowTiles, int TokenTiles, int Ahead, bool Aligned, int BlocksPerSm = 1>
void launch(const AdapterWeights& w, const AdapterSegments& s, const bf16* x, int64_t K, bf16* t, cudaStream_t stream,
            bool beside = false) {
  constexpr int kTokens = TokenTiles * kShrinkTokens;
  const int tiles = w.slices * w.rank / kShrinkRows;
  const dim3 grid((tiles + RowTiles - 1) / RowTiles, s.count, (s.most_rows + kTokens - 1) / kTokens);
  launch_early(shrink_kernel<RowTiles, TokenTiles, Ahead, Aligned, BlocksPerSm>, !beside, grid, kShrinkThreads, stream,
               "launch of the adapters' shrink", w, SegmentsParameter(s, s.count), x, static_cast<int>(K), t);
}

template <class Kernel>
void prepare(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of the adapters");
}

}  // namespace

void adapter_shrink(const AdapterWeights& w, const AdapterSegments& s, const bf16* x, int64_t K, bf16* t,
                    cudaStream_t stream, bool beside) {
  if (s.count == 0) return;
  const bool aligned =
      K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(w.a) % 16 == 0;
  if (!aligned) return launch<1, 2, 1, false>(w, s, x, K, t, stream, beside);
  if (s.rows >= kWideFrom) return launch<2, 4, 2, true>(w, s, x, K, t, stream, beside);
  if (beside && s.most_rows > 2 * kShrinkTokens) return launch<1, 4, 3, true>(w, s, x, K, t, stream, beside);
  if (s.most_rows > kShrinkTokens) return launch<1, 2, 5, true>(w, s, x, K, t, stream, beside);
  if (!beside && s.count * w.slices * w.rank / kShrinkRows > kFillingBlocks) {
    return launch<1, 1, 3, true, 2>(w, s, x, K, t, stream, beside);
  }
  launch<1, 1, 8, true>(w, s, x, K, t, stream, beside);
}

bool adapter_fits_beside(const AdapterWeights& w, const AdapterSegments& s) {
  const int tokens = s.most_rows <= kShrinkTokens ? kShrinkTokens : s.most_rows <= 16 ? 16 : 32;
  const int blocks = s.count * ((s.most_rows + tokens - 1) / tokens) * (w.slices * w.rank / kShrinkRows);
  return s.rows < kWideFrom && blocks <= kSpareRounds * kSpare;
}

void prepare_adapter_shrink() {
  prepare(shrink_kernel<1, 2, 1, false, 1>);
  prepare(shrink_kernel<2, 4, 2, true, 1>);
  prepare(shrink_kernel<1, 2, 5, true, 1>);
  prepare(shrink_kernel<1, 4, 3, true, 1>);
  prepare(shrink_kernel<1, 1, 3, true, 2>);
  prepare(shrink_kernel<1, 1, 8, true, 1>);
}

}  // namespace refit::cuda
