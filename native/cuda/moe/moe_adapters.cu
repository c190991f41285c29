// The adapters of experts. A block takes a window of an expert's rows and computes the rows of one adapter after the
// other: after the sort by expert and token, those of one adapter are adjacent if the step's tokens are.
#include "cuda/adapters/adapters_expand.cuh"
#include "cuda/adapters/adapters_shrink.cuh"
#include "cuda/device/check.h"
#include "cuda/device/load_kernels.h"
#include "cuda/moe/moe_kernels.h"

namespace refit::cuda {
namespace {

constexpr int kWindowRows = 16;  // of expand

struct ExpertAdapters {
  const RowTile* tiles;
  const int32_t* tile_count;
  const int32_t *tokens, *token_slots;
  AdapterWeights w;  // a [slots * experts * slices * rank, K], b [slots * experts * all columns, rank]
  int experts;
};

// A window of a row tile's slots, and the adapter slot of each.
template <int Rows>
struct Window {
  int expert, first, rows;

  // False if there is none. All threads of the block call it, with memory that no thread reads any more.
  __device__ __forceinline__ bool open(const ExpertAdapters& e, int32_t (&slots)[Rows]) {
    const RowTile tile = e.tiles[blockIdx.y];
    if (static_cast<int>(blockIdx.y) >= *e.tile_count) return false;
    const int begin = static_cast<int>(blockIdx.z) * Rows;
    expert = tile.expert;
    first = tile.first + begin;
    rows = min(tile.rows - begin, Rows);
    if (rows <= 0) return false;
    for (int m = threadIdx.x; m < rows; m += blockDim.x) slots[m] = e.token_slots[e.tokens[first + m]];
    __syncthreads();
    return true;
  }
  // The end of the rows from `begin` on that share its slot.
  __device__ __forceinline__ int run(const int32_t (&slots)[Rows], int begin) const {
    int end = begin + 1;
    while (end < rows && slots[end] == slots[begin]) end++;
    return end;
  }
};

// Blocks (tiles of A's rows, row tile, window). Row i is x[from[slot]], or x[slot] if `from` is null.
template <int RowTiles, int TokenTiles, int Ahead, bool Aligned>
__global__ void __launch_bounds__(kShrinkThreads, 1)
    shrink_experts(ExpertAdapters e, const Element* __restrict__ x, const int32_t* __restrict__ from, int K,
                   Element* __restrict__ t) {
  using Block = ShrinkBlock<RowTiles, TokenTiles, Ahead, Aligned>;
  __shared__ typename Block::Sums sums;
  __shared__ int32_t slots[Block::kTokens];
  Window<Block::kTokens> window;
  if (!window.open(e, slots)) return;
  const AdapterWeights& w = e.w;
  const int all = w.slices * w.rank, tiles = all / kShrinkRows, first_tile = static_cast<int>(blockIdx.x) * RowTiles;
  const int g = threadIdx.x % 32 / 4;
  for (int begin = 0, end; begin < window.rows; begin = end) {
    end = window.run(slots, begin);
    if (slots[begin] < 0) continue;
    Block block;
    bool any = false, active[RowTiles];
#pragma unroll
    for (int i = 0; i < RowTiles; i++) {
      const int row = (first_tile + i) * kShrinkRows, slice = row / w.rank;
      active[i] = first_tile + i < tiles && row - slice * w.rank < adapter_entry(w, slots[begin], slice).rank;
      any |= active[i];
      const Element* const a = w.a + ((int64_t{slots[begin]} * e.experts + window.expert) * all + row + g) * K;
      block.a[i] = active[i] ? a : nullptr;
    }
    if (!any) continue;
    block.x = x;
#pragma unroll
    for (int j = 0; j < TokenTiles; j++) {
      const int m = begin + j * kShrinkTokens + g;
      const int slot = window.first + m;
      block.row[j] = m < end ? (from != nullptr ? from[slot] : slot) * K : -1;
    }
    Element* const to = t + int64_t{window.first + begin} * all + first_tile * kShrinkRows;
    __syncthreads();  // the sums of the run before have been read
    block.run(
        K, sums, [] {},
        [&](int i, int m, int n, float sum) {
          if (m < end - begin && active[i]) put(to + int64_t{m} * all + i * kShrinkRows + n, sum);
        });
  }
}

// Blocks (columns of the slices, each slice in whole blocks; row tile; window). kSet: y [slots, all columns] becomes
// the adapters' part, or zero; else the part is added to y.
template <class Out, bool kSet>
__global__ void __launch_bounds__(kExpandThreads)
    expand_experts(ExpertAdapters e, const Element* __restrict__ t, Out* __restrict__ y) {
  constexpr int kColumns = kExpandWarps * kExpandColumns;
  __shared__ int32_t slots[kWindowRows];
  Window<kWindowRows> window;
  if (!window.open(e, slots)) return;
  const AdapterWeights& w = e.w;
  // All slices have the same number of columns.
  const int64_t columns = w.columns[0], tiles = (columns + kColumns - 1) / kColumns, all = w.slices * columns;
  const int slice = static_cast<int>(blockIdx.x / tiles);
  const int64_t begin_column = (blockIdx.x % tiles * kExpandWarps + threadIdx.x / 32) * kExpandColumns;
  if (begin_column >= columns) return;
  const int g = threadIdx.x % 32 / 4, own = threadIdx.x % 4 * 8;
  const int64_t column = slice * columns + begin_column, there = columns - begin_column - own;
  for (int begin = 0, end; begin < window.rows; begin = end) {
    end = window.run(slots, begin);
    const int slot = slots[begin], rows = end - begin;
    const AdapterEntry entry = slot < 0 ? AdapterEntry{0.0f, 0} : adapter_entry(w, slot, slice);
    if (!kSet && entry.rank == 0) continue;
    ExpandWarp<2> warp;
    if (entry.rank > 0) {
      const int64_t ldt = int64_t{w.slices} * w.rank, matrix = int64_t{slot} * e.experts + window.expert;
      warp.start(t + (window.first + begin) * ldt + slice * w.rank, ldt, rows, w.b + (matrix * all + column) * w.rank,
                 w.rank, columns - begin_column);
      warp.finish(entry.rank);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = h * 8 + g;
      if (m >= rows) continue;
      Out* const to = y + (window.first + begin + m) * all + column + own;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i >= there) continue;
        put(to + i, kSet ? entry.scale * warp.sum(h, i) : __fmaf_rn(entry.scale, warp.sum(h, i), as_float(to[i])));
      }
    }
  }
}

unsigned windows(int tile_rows, int rows) { return static_cast<unsigned>((tile_rows + rows - 1) / rows); }

template <int RowTiles, int TokenTiles, int Ahead, bool Aligned>
void launch_shrink(const ExpertAdapters& e, const Element* x, const int32_t* from, int64_t K, Element* t,
                   int64_t row_tiles, int tile_rows, cudaStream_t stream) {
  const int tiles = e.w.slices * e.w.rank / kShrinkRows;
  const dim3 grid((tiles + RowTiles - 1) / RowTiles, static_cast<unsigned>(row_tiles),
                  windows(tile_rows, TokenTiles * kShrinkTokens));
  shrink_experts<RowTiles, TokenTiles, Ahead, Aligned>
      <<<grid, kShrinkThreads, 0, stream>>>(e, x, from, static_cast<int>(K), t);
  check_launch("launch of the experts' shrink");
}

void shrink(const ExpertAdapters& e, const Element* x, const int32_t* from, int64_t K, Element* t, int64_t row_tiles,
            int tile_rows, cudaStream_t stream) {
  const bool aligned =
      K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(e.w.a) % 16 == 0;
  if (!aligned) {
    launch_shrink<1, 2, 1, false>(e, x, from, K, t, row_tiles, tile_rows, stream);
  } else if (tile_rows < 64) {
    launch_shrink<1, 1, 8, true>(e, x, from, K, t, row_tiles, tile_rows, stream);
  } else {
    launch_shrink<2, 4, 2, true>(e, x, from, K, t, row_tiles, tile_rows, stream);
  }
}

template <class Out, bool kSet>
void expand(const ExpertAdapters& e, const Element* t, Out* y, int64_t row_tiles, int tile_rows, cudaStream_t stream) {
  constexpr int64_t kColumns = kExpandWarps * kExpandColumns;
  const int64_t tiles = (e.w.columns[0] + kColumns - 1) / kColumns;
  const dim3 grid(static_cast<unsigned>(e.w.slices * tiles), static_cast<unsigned>(row_tiles),
                  windows(tile_rows, kWindowRows));
  expand_experts<Out, kSet><<<grid, kExpandThreads, 0, stream>>>(e, t, y);
  check_launch("launch of the experts' expand");
}

ExpertAdapters adapters_of(const MoeShape& s, const MoeScratch& scratch, const MoeAdapters& adapters, const Element* a,
                           const Element* b, int first_slice, int slices, int64_t columns) {
  ExpertAdapters e{scratch.tiles, scratch.tile_count, scratch.tokens, adapters.token_slots, {}, s.experts};
  e.w.a = a;
  e.w.b = b;
  e.w.table = adapters.table + 2 * first_slice;
  e.w.slot_floats = adapters.slot_floats;
  e.w.rank = s.adapter_rank;
  e.w.slices = slices;
  for (int i = 0; i < slices; i++) e.w.columns[i] = columns;
  return e;
}

}  // namespace

void adapt_gate_up(const MoeShape& s, const MoeScratch& scratch, const MoeAdapters& adapters, const Element* x,
                   int64_t count, int tile_rows, cudaStream_t stream) {
  const ExpertAdapters e = adapters_of(s, scratch, adapters, adapters.a13, adapters.b13, 0, 2, s.inter);
  const int64_t row_tiles = max_row_tiles(count * s.per_token, s.experts, tile_rows);
  shrink(e, x, scratch.tokens, s.hidden, scratch.shrunk, row_tiles, tile_rows, stream);
  expand<float, true>(e, scratch.shrunk, scratch.delta, row_tiles, tile_rows, stream);
}

void adapt_down(const MoeShape& s, const MoeScratch& scratch, const MoeAdapters& adapters, int64_t count, bool partial,
                int tile_rows, cudaStream_t stream) {
  const ExpertAdapters e = adapters_of(s, scratch, adapters, adapters.a2, adapters.b2, 2, 1, s.outputs());
  const int64_t row_tiles = max_row_tiles(count * s.per_token, s.experts, tile_rows);
  shrink(e, scratch.act, nullptr, s.depth(), scratch.shrunk, row_tiles, tile_rows, stream);
  if (partial) {
    expand<float, false>(e, scratch.shrunk, static_cast<float*>(scratch.out), row_tiles, tile_rows, stream);
  } else {
    expand<Element, false>(e, scratch.shrunk, static_cast<Element*>(scratch.out), row_tiles, tile_rows, stream);
  }
}

void prepare_moe_adapters() {
  load_kernels("loading a kernel of the experts' adapters", shrink_experts<1, 2, 1, false>,
               shrink_experts<1, 1, 8, true>, shrink_experts<2, 4, 2, true>, expand_experts<float, true>,
               expand_experts<float, false>, expand_experts<Element, false>);
}

}  // namespace refit::cuda
