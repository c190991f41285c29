#include "cuda/adapters/adapters_expand.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/device/load_kernels.h"

namespace refit::cuda {
namespace {

// From so many rows on, a warp reads B once for 32 rows.
constexpr int kWideExpandFrom = 512;
constexpr int kGatherThreads = 128;

// The tiles of a launch, each of kExpandWarps * kExpandColumns columns of one slice, and the columns of the slices.
struct ExpandTiles {
  int begin[kMostAdapterSlices], end[kMostAdapterSlices], count;  // of each slice's tiles, and all
  int before[kMostAdapterSlices], columns[kMostAdapterSlices], all_columns;

  explicit ExpandTiles(const AdapterWeights& w) : count(0), all_columns(0) {
    constexpr int kColumns = kExpandWarps * kExpandColumns;
    for (int i = 0; i < kMostAdapterSlices; i++) {
      columns[i] = i < w.slices ? static_cast<int>(w.columns[i]) : 0;
      begin[i] = count, before[i] = all_columns;
      count += (columns[i] + kColumns - 1) / kColumns, all_columns += columns[i];
      end[i] = count;
    }
  }
};

// The columns of y that a warp computes in one tile.
struct ExpandTile {
  int slice = 0, column = 0, left = 0;  // left: columns of the slice from the first one on; may be negative
};
__device__ __forceinline__ ExpandTile expand_tile(const ExpandTiles& tiles, int tile) {
  static_assert(kMostAdapterSlices == 3);
  ExpandTile at;
  at.slice = (tile >= tiles.end[0]) + (tile >= tiles.end[1]);
  const int column =
      ((tile - tiles.begin[at.slice]) * kExpandWarps + static_cast<int>(threadIdx.x) / 32) * kExpandColumns;
  at.column = tiles.before[at.slice] + column;
  at.left = tiles.columns[at.slice] - column;
  return at;
}

// At most 8 * Halves rows of t and y, for one warp. b: of the slot; t and y: of this thread's first row; all at this
// thread's columns.
template <class Out, int Halves, bool kVector>
struct ExpandRows {
  const Element *b, *t;
  Out* y;
  const float2* entries;  // of the slot
  int ldy, ldt, rank, rows;

  // A tile's operands besides B. They are loaded one tile ahead.
  struct Loaded {
    ExpandTile at;
    float2 entry;
    Eight<Out> base[Halves];
    uint4 t[Halves];
  };

  __device__ __forceinline__ void fetch_b(ExpandRing<1>& ring, int stage, const ExpandTile& at) const {
    ring.copy(stage, 0, b + at.column * rank, rank, at.left - expand_column());
  }
  __device__ __forceinline__ void load(Loaded& to, const ExpandTile& at) const {
    to.at = at;
    to.entry = entries[at.slice];
#pragma unroll
    for (int h = 0; h < Halves; h++) {
      if (8 * h < rows) to.base[h].template load<kVector>(y + at.column + 8 * h * ldy, at.left - expand_chunk());
      to.t[h] = load_fresh(t + at.slice * rank + 8 * h * ldt, 8 * h < rows && expand_chunk() < rank);
    }
  }
  __device__ __forceinline__ void add(Loaded& now, const ExpandRing<1>& ring, int stage) const {
    const AdapterEntry entry = adapter_entry(now.entry, rank);
    if (entry.rank == 0) return;
    ExpandWarp<Halves> warp;
    warp.b = b - expand_chunk() + now.at.column * rank, warp.ldb = rank, warp.columns = now.at.left - expand_column();
    warp.t = t - expand_chunk() + now.at.slice * rank, warp.ldt = ldt, warp.rows = rows;
#pragma unroll
    for (int h = 0; h < Halves; h++) warp.x[h] = now.t[h];
    warp.finish(entry.rank, ring, stage, 0);
#pragma unroll
    for (int h = 0; h < Halves; h++) {
      if (8 * h >= rows) continue;
      now.base[h].add(entry.scale, warp, h);
      now.base[h].template store<kVector>(y + now.at.column + 8 * h * ldy, now.at.left - expand_chunk());
    }
  }
};

// Blocks (columns of the slices, each slice in whole tiles; part of the segment; segment). It begins early, and then
// loads B.
template <class Out, int Halves, bool kVector>
__global__ void __launch_bounds__(kExpandThreads, 4)
    expand_kernel(AdapterWeights w, const __grid_constant__ ExpandTiles tiles,
                  const __grid_constant__ SegmentsParameter segments, const Element* t, Out* y, int ldy) {
  constexpr int kRows = Halves * kExpandHalf;
  constexpr bool kAhead = Halves <= 2;  // more would need too many registers
  using Rows = ExpandRows<Out, Halves, kVector>;
  __shared__ ExpandRing<1> ring;
  const AdapterSegment segment = segments.at(blockIdx.z);
  const int part = static_cast<int>(blockIdx.y) * kRows, step = static_cast<int>(gridDim.x);
  if (segment.rows <= part) return wait_for_kernel_before();
  const int64_t first = segment.first + part + expand_row();
  const int chunk = expand_chunk(), ldt = w.slices * w.rank;
  const Rows rows{w.b + int64_t{segment.slot} * tiles.all_columns * w.rank + expand_column() * w.rank + chunk,
                  t + first * ldt + chunk,
                  y + first * ldy + chunk,
                  reinterpret_cast<const float2*>(w.table + segment.slot * w.slot_floats),
                  ldy,
                  ldt,
                  w.rank,
                  min(segment.rows - part, kRows) - expand_row()};
  int tile = static_cast<int>(blockIdx.x);
#pragma unroll
  for (int stage = 0; stage < ring.kStages; stage++) {
    if (tile + stage * step < tiles.count) rows.fetch_b(ring, stage, expand_tile(tiles, tile + stage * step));
    commit_async();
  }
  wait_for_kernel_before();
  typename Rows::Loaded now;
  if (kAhead) rows.load(now, expand_tile(tiles, tile));
  for (int stage = 0; tile < tiles.count; tile += step, stage = (stage + 1) % ring.kStages) {
    typename Rows::Loaded next;
    if (!kAhead) rows.load(now, expand_tile(tiles, tile));
    if (kAhead && tile + step < tiles.count) rows.load(next, expand_tile(tiles, tile + step));
    ring.wait();
    rows.add(now, ring, stage);
    __syncwarp();
    const int later = tile + ring.kStages * step;
    if (later < tiles.count) rows.fetch_b(ring, stage, expand_tile(tiles, later));
    commit_async();
    if (kAhead) now = next;
  }
}

template <class Out, int Halves, bool kVector>
void launch(const AdapterWeights& w, const AdapterSegments& s, const Element* t, Out* y, int64_t ldy,
            cudaStream_t stream) {
  constexpr int kRows = Halves * kExpandHalf;
  const ExpandTiles tiles(w);
  const int parts = (s.most_rows + kRows - 1) / kRows;
  // Parts that have rows; those of long segments differ too much to be spread evenly.
  const int64_t filled = std::min(s.count * parts, s.count + s.rows / kRows);
  const dim3 grid(s.rows >= kWideExpandFrom ? tiles.count : expand_blocks(tiles.count, filled), parts, s.count);
  launch_early(expand_kernel<Out, Halves, kVector>, true, grid, kExpandThreads, stream,
               "launch of the adapters' expand", w, tiles, SegmentsParameter(s, s.count), t, y, static_cast<int>(ldy));
}

// One block a row of a segment.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(AdapterWeights w, const AdapterSegment* __restrict__ segments, const int32_t* __restrict__ tokens,
                  int64_t first_row, int64_t vocab_rows, Element* __restrict__ t) {
  const AdapterSegment segment = segments[blockIdx.y];
  if (static_cast<int>(blockIdx.x) >= segment.rows) return;
  const int64_t at = segment.first + blockIdx.x, row = tokens[at] - first_row;
  const bool here = row >= 0 && row < vocab_rows;
  for (int i = threadIdx.x; i < w.rank; i += kGatherThreads) {
    t[at * w.rank + i] = here ? w.a[(segment.slot * vocab_rows + row) * w.rank + i] : Element(0.0f);
  }
}

template <class Out>
void prepare_expand() {
  load_kernels("loading a kernel of the adapters", expand_kernel<Out, 1, true>, expand_kernel<Out, 2, true>,
               expand_kernel<Out, 2, false>, expand_kernel<Out, 4, true>);
}

}  // namespace

template <class Out>
void adapter_expand(const AdapterWeights& w, const AdapterSegments& s, const Element* t, Out* y, int64_t ldy,
                    cudaStream_t stream) {
  if (s.count == 0) return;
  bool vector = ldy % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  for (int i = 0; i < w.slices; i++) vector &= w.columns[i] % 8 == 0;
  if (!vector) return launch<Out, 2, false>(w, s, t, y, ldy, stream);
  if (s.rows >= kWideExpandFrom) return launch<Out, 4, true>(w, s, t, y, ldy, stream);
  if (s.most_rows > kExpandHalf) return launch<Out, 2, true>(w, s, t, y, ldy, stream);
  launch<Out, 1, true>(w, s, t, y, ldy, stream);
}

template void adapter_expand(const AdapterWeights&, const AdapterSegments&, const Element*, Element*, int64_t,
                             cudaStream_t);
template void adapter_expand(const AdapterWeights&, const AdapterSegments&, const Element*, float*, int64_t,
                             cudaStream_t);

void adapter_gather(const AdapterWeights& w, const AdapterSegments& s, const int32_t* tokens, int64_t first_row,
                    int64_t vocab_rows, Element* t, cudaStream_t stream) {
  if (s.count == 0) return;
  gather_kernel<<<dim3(s.most_rows, s.count), kGatherThreads, 0, stream>>>(w, s.list, tokens, first_row, vocab_rows, t);
  check_launch("launch of the adapters' gather");
}

void prepare_adapter_shrink();
void prepare_adapter_activate();

void prepare_adapters() {
  prepare_adapter_shrink();
  prepare_adapter_activate();
  prepare_expand<Element>();
  prepare_expand<float>();
  load_kernels("loading a kernel of the adapters", gather_kernel);
}

}  // namespace refit::cuda
