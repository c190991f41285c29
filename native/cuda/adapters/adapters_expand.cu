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

// Blocks (columns of the slices, each slice in whole blocks; segment; part of the segment). It begins early, and then
// loads B.
template <class Out, int Halves, bool kVector>
__global__ void __launch_bounds__(kExpandThreads, 4)
    expand_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const bf16* t, Out* y,
                  int64_t ldy) {
  constexpr int kRows = Halves * kExpandHalf, kColumns = kExpandWarps * kExpandColumns;
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int rows = min(segment.rows - static_cast<int>(blockIdx.z) * kRows, kRows);
  if (rows <= 0) return wait_for_kernel_before();
  int64_t tile = blockIdx.x, before = 0, all = 0, columns = 0;  // before: columns of the slices before this one
  int slice = 0;
#pragma unroll
  for (int i = 0; i < kMostAdapterSlices; i++) {
    if (i >= w.slices) break;
    const int64_t tiles = (w.columns[i] + kColumns - 1) / kColumns;
    if (i == slice) {
      if (tile >= tiles) {
        tile -= tiles;
        before += w.columns[i];
        slice++;
      } else {
        columns = w.columns[i];
      }
    }
    all += w.columns[i];
  }
  const int64_t begin = (tile * kExpandWarps + threadIdx.x / 32) * kExpandColumns;  // within the slice
  if (begin >= columns) return wait_for_kernel_before();
  const int64_t first = segment.first + int64_t{blockIdx.z} * kRows;
  const int g = threadIdx.x % 32 / 4, own = threadIdx.x % 4 * 8;
  const int64_t there = columns - begin - own;  // columns of this thread that exist
  Out* const to = y + first * ldy + before + begin + own;
  ExpandWarp<Halves> warp;
  const int64_t ldt = int64_t{w.slices} * w.rank;
  warp.start(t + first * ldt + slice * w.rank, ldt, rows, w.b + (segment.slot * all + before + begin) * w.rank, w.rank,
             columns - begin);
  const AdapterEntry entry = adapter_entry(w, segment.slot, slice);
  wait_for_kernel_before();
  if (entry.rank == 0) return;
  Eight<Out> base[Halves];
#pragma unroll
  for (int h = 0; h < Halves; h++) {
    const int m = h * kExpandHalf + g;
    if (m < rows) base[h].template load<kVector>(to + m * ldy, there);
  }
  warp.finish(entry.rank);
#pragma unroll
  for (int h = 0; h < Halves; h++) {
    const int m = h * kExpandHalf + g;
    if (m >= rows) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) put(&base[h].v[e], __fmaf_rn(entry.scale, warp.sum(h, e), as_float(base[h].v[e])));
    base[h].template store<kVector>(to + m * ldy, there);
  }
}

template <class Out, int Halves, bool kVector>
void launch(const AdapterWeights& w, const AdapterSegments& s, const bf16* t, Out* y, int64_t ldy, cudaStream_t stream,
            bool early) {
  constexpr int kRows = Halves * kExpandHalf;
  int64_t blocks = 0;
  for (int i = 0; i < w.slices; i++) blocks += column_tiles(w.columns[i]);
  const dim3 grid(static_cast<unsigned>(blocks), s.count, (s.most_rows + kRows - 1) / kRows);
  launch_early(expand_kernel<Out, Halves, kVector>, early, grid, kExpandThreads, stream,
               "launch of the adapters' expand", w, SegmentsParameter(s, s.count), t, y, ldy);
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
