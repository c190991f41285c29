#include "cuda/adapters/adapters_expand.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"

namespace refit::cuda {
namespace {

// From so many rows on, a warp reads B once for 32 rows.
constexpr int kWideFrom = 512;
constexpr int kGatherThreads = 128;

int64_t column_tiles(int64_t columns) {
  return (columns + kExpandWarps * kExpandColumns - 1) / (kExpandWarps * kExpandColumns);
}

// The columns of y that a warp computes in one tile.
struct ExpandTile {
  int slice;
  int64_t before, all;  // columns of the slices before this one, and of all
  int64_t begin, left;  // the first column in the slice, and how many there are from it on; may be negative
};
__device__ __forceinline__ ExpandTile expand_tile(const AdapterWeights& w, int64_t tile) {
  constexpr int kColumns = kExpandWarps * kExpandColumns;
  ExpandTile at{};
  int64_t columns = 0;
#pragma unroll
  for (int i = 0; i < kMostAdapterSlices; i++) {
    if (i >= w.slices) break;
    const int64_t tiles = (w.columns[i] + kColumns - 1) / kColumns;
    if (i == at.slice) {
      if (tile >= tiles) {
        tile -= tiles;
        at.before += w.columns[i];
        at.slice++;
      } else {
        columns = w.columns[i];
      }
    }
    at.all += w.columns[i];
  }
  at.begin = (tile * kExpandWarps + threadIdx.x / 32) * kExpandColumns;
  at.left = columns - at.begin;
  return at;
}

// Adds a tile to `rows` rows of t and y. B's first columns are at `stage` of the ring.
template <class Out, int Halves, bool kVector>
__device__ __forceinline__ void expand_one(const AdapterWeights& w, int slot, const ExpandTile& at, const bf16* b,
                                           const bf16* t, Out* y, int64_t ldy, int rows, const ExpandRing<1>& ring,
                                           int stage) {
  const int g = threadIdx.x % 32 / 4, own = threadIdx.x % 4 * 8;
  const int64_t there = at.left - own, ldt = int64_t{w.slices} * w.rank;  // there: this thread's columns that exist
  Out* const to = y + at.before + at.begin + own;
  const AdapterEntry entry = adapter_entry(w, slot, at.slice);
  Eight<Out> base[Halves];
#pragma unroll
  for (int h = 0; h < Halves; h++) {
    const int m = h * kExpandHalf + g;
    if (m < rows) base[h].template load<kVector>(to + m * ldy, there);
  }
  ExpandWarp<Halves> warp;
  warp.place(t + at.slice * w.rank, ldt, rows, b, w.rank, at.left);
  warp.load_t(own, w.rank);
  ring.wait();
  warp.finish(entry.rank, ring, stage, 0);
  if (entry.rank == 0) return;
#pragma unroll
  for (int h = 0; h < Halves; h++) {
    const int m = h * kExpandHalf + g;
    if (m >= rows) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) put(&base[h].v[e], __fmaf_rn(entry.scale, warp.sum(h, e), as_float(base[h].v[e])));
    base[h].template store<kVector>(to + m * ldy, there);
  }
}

// Blocks (columns of the slices, each slice in whole tiles; segment; part of the segment). It begins early, and then
// loads B.
template <class Out, int Halves, bool kVector>
__global__ void __launch_bounds__(kExpandThreads, 4)
    expand_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const bf16* t, Out* y,
                  int64_t ldy, int tiles) {
  constexpr int kRows = Halves * kExpandHalf;
  __shared__ ExpandRing<1> ring;
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int rows = min(segment.rows - static_cast<int>(blockIdx.z) * kRows, kRows), step = static_cast<int>(gridDim.x);
  if (rows <= 0) return wait_for_kernel_before();
  const int64_t first = segment.first + int64_t{blockIdx.z} * kRows;
  const auto b_of = [&](const ExpandTile& at) { return w.b + (segment.slot * at.all + at.before + at.begin) * w.rank; };
  const auto fetch = [&](int stage, int tile) {
    if (tile < tiles) {
      const ExpandTile at = expand_tile(w, tile);
      if (at.left > 0) ring.copy(stage, 0, b_of(at), w.rank, at.left);
    }
    commit_async();
  };
  int tile = static_cast<int>(blockIdx.x);
#pragma unroll
  for (int stage = 0; stage < ring.kStages; stage++) fetch(stage, tile + stage * step);
  wait_for_kernel_before();
  for (int stage = 0; tile < tiles; tile += step, stage = (stage + 1) % ring.kStages) {
    const ExpandTile at = expand_tile(w, tile);
    if (at.left > 0) {
      expand_one<Out, Halves, kVector>(w, segment.slot, at, b_of(at), t + first * w.slices * w.rank, y + first * ldy,
                                       ldy, rows, ring, stage);
    }
    __syncwarp();
    fetch(stage, tile + ring.kStages * step);
  }
}

template <class Out, int Halves, bool kVector>
void launch(const AdapterWeights& w, const AdapterSegments& s, const bf16* t, Out* y, int64_t ldy, cudaStream_t stream,
            bool early) {
  constexpr int kRows = Halves * kExpandHalf;
  int64_t tiles = 0;
  for (int i = 0; i < w.slices; i++) tiles += column_tiles(w.columns[i]);
  const int parts = (s.most_rows + kRows - 1) / kRows;
  // Parts that have rows; those of long segments differ too much to be spread evenly.
  const int64_t filled = std::min(s.count * parts, s.count + s.rows / kRows);
  const dim3 grid(s.rows >= kWideFrom ? static_cast<unsigned>(tiles) : expand_blocks(tiles, filled), s.count, parts);
  launch_early(expand_kernel<Out, Halves, kVector>, early, grid, kExpandThreads, stream,
               "launch of the adapters' expand", w, SegmentsParameter(s, s.count), t, y, ldy, static_cast<int>(tiles));
}

// One block a row of a segment.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(AdapterWeights w, const AdapterSegment* __restrict__ segments, const int32_t* __restrict__ tokens,
                  int64_t first_row, int64_t vocab_rows, bf16* __restrict__ t) {
  const AdapterSegment segment = segments[blockIdx.y];
  if (static_cast<int>(blockIdx.x) >= segment.rows) return;
  const int64_t at = segment.first + blockIdx.x, row = tokens[at] - first_row;
  const bool here = row >= 0 && row < vocab_rows;
  for (int i = threadIdx.x; i < w.rank; i += kGatherThreads) {
    t[at * w.rank + i] = here ? w.a[(segment.slot * vocab_rows + row) * w.rank + i] : bf16(0.0f);
  }
}

template <class Kernel>
void prepare(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of the adapters");
}

template <class Out>
void prepare_expand() {
  prepare(expand_kernel<Out, 1, true>);
  prepare(expand_kernel<Out, 2, true>);
  prepare(expand_kernel<Out, 2, false>);
  prepare(expand_kernel<Out, 4, true>);
}

}  // namespace

template <class Out>
void adapter_expand(const AdapterWeights& w, const AdapterSegments& s, const bf16* t, Out* y, int64_t ldy,
                    cudaStream_t stream, bool early) {
  if (s.count == 0) return;
  bool vector = ldy % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  for (int i = 0; i < w.slices; i++) vector &= w.columns[i] % 8 == 0;
  if (!vector) return launch<Out, 2, false>(w, s, t, y, ldy, stream, early);
  if (s.rows >= kWideFrom) return launch<Out, 4, true>(w, s, t, y, ldy, stream, early);
  if (s.most_rows > kExpandHalf) return launch<Out, 2, true>(w, s, t, y, ldy, stream, early);
  launch<Out, 1, true>(w, s, t, y, ldy, stream, early);
}

template void adapter_expand(const AdapterWeights&, const AdapterSegments&, const bf16*, bf16*, int64_t, cudaStream_t,
                             bool);
template void adapter_expand(const AdapterWeights&, const AdapterSegments&, const bf16*, float*, int64_t, cudaStream_t,
                             bool);

void adapter_gather(const AdapterWeights& w, const AdapterSegments& s, const int32_t* tokens, int64_t first_row,
                    int64_t vocab_rows, bf16* t, cudaStream_t stream) {
  if (s.count == 0) return;
  gather_kernel<<<dim3(s.most_rows, s.count), kGatherThreads, 0, stream>>>(w, s.list, tokens, first_row, vocab_rows, t);
  check_launch("launch of the adapters' gather");
}

void prepare_adapter_shrink();
void prepare_adapter_activate();

void prepare_adapters() {
  prepare_adapter_shrink();
  prepare_adapter_activate();
  prepare_expand<bf16>();
  prepare_expand<float>();
  prepare(gather_kernel);
}

}  // namespace refit::cuda
