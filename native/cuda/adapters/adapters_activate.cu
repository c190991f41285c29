// The adapters' part of gate and up together with the activation, which reads both: one pass over the base products
// instead of two.
#include <algorithm>

#include "cuda/adapters/adapters_expand.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/device/load_kernels.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

// From so many rows on, a block takes all rows of a segment.
constexpr int kWideActivateFrom = 512;

template <Activation kActivation>
__device__ __forceinline__ Element activated(float gate, float up) {
  return to_element(__fmul_rn(round_element(activated_as_cpu<kActivation>(gate)), up));
}

// One tile of columns of all rows of a segment of the base model: from and act begin at this thread's first column of
// the segment's first row.
template <Activation kActivation>
__device__ __forceinline__ void activate_base(const Element* from, Element* act, int64_t inter, int rows,
                                              int64_t there) {
  constexpr int kTogether = 4;
  for (int begin = threadIdx.x % 32 / 4; begin < rows; begin += kTogether * kExpandHalf) {
    Eight<Element> gate[kTogether], up[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int64_t m = begin + i * kExpandHalf;
      if (m >= rows) continue;
      gate[i].template load<true>(from + m * 2 * inter, there);
      up[i].template load<true>(from + m * 2 * inter + inter, there);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int64_t m = begin + i * kExpandHalf;
      if (m >= rows) continue;
#pragma unroll
      for (int e = 0; e < 8; e++) gate[i].v[e] = activated<kActivation>(as_float(gate[i].v[e]), as_float(up[i].v[e]));
      gate[i].template store<true>(act + m * inter, there);
    }
  }
}

// Stores the activation of at most 8 / Lanes rows, of which the first lanes have 8 columns each. The exponential and
// the division take most of the instructions, so `Lanes` lanes compute them for each of these. All lanes call it. act:
// at this thread's first column.
template <Activation kActivation, int Lanes>
__device__ __forceinline__ void activate_rows(const Eight<Element>& gate, const Eight<Element>& up, Element* act,
                                              int64_t inter, int rows, int64_t there) {
  constexpr int kRows = kExpandHalf / Lanes, kPairs = 4 / Lanes;
  const int lane = threadIdx.x % 32, row = lane / 4 % kRows, part = lane / 4 / kRows, from = 4 * row + lane % 4;
  const auto* const gates = reinterpret_cast<const uint32_t*>(gate.v);
  const auto* const ups = reinterpret_cast<const uint32_t*>(up.v);
  uint32_t own[2][kPairs];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t g = Lanes == 1 ? gates[i] : __shfl_sync(~0u, gates[i], from);
    const uint32_t u = Lanes == 1 ? ups[i] : __shfl_sync(~0u, ups[i], from);
    if (i / kPairs == part) own[0][i % kPairs] = g, own[1][i % kPairs] = u;
  }
  if (row >= rows || there < 8) return;
  uint32_t out[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; i++) {
    const Element2 pair =
        pair_elements(activated<kActivation>(half_to_float<0>(own[0][i]), half_to_float<0>(own[1][i])),
                      activated<kActivation>(half_to_float<1>(own[0][i]), half_to_float<1>(own[1][i])));
    out[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  Element* const to = act + row * inter + 2 * kPairs * part;
  if constexpr (Lanes == 1) store_16(to, make_uint4(out[0], out[1], out[2], out[3]));
  if constexpr (Lanes == 2) *reinterpret_cast<uint2*>(to) = make_uint2(out[0], out[1]);
  if constexpr (Lanes == 4) *reinterpret_cast<uint32_t*>(to) = out[0];
}

// At most 8 * Halves rows of an adapter, for one warp. b: of the slot; t, gate_up and act: of this thread's first row;
// all at this thread's columns, to which a tile adds its first one.
template <Activation kActivation, int Halves>
struct AdaptedRows {
  const Element *b, *t, *gate_up;
  Element* act;
  int inter, rank, rows;

  // Gate and up of a tile. They are loaded one tile ahead.
  struct Base {
    Eight<Element> v[2][Halves];
  };
  struct Shrunk {
    uint4 v[2][Halves];
  };

  __device__ __forceinline__ void fetch_b(ExpandRing<2>& ring, int stage, int begin) const {
    if (begin < inter) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        ring.copy(stage, i, b + (i * inter + begin) * rank, rank, inter - begin - expand_column());
      }
    }
    commit_async();
  }
  __device__ __forceinline__ void load(Base& to, int begin) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int h = 0; h < Halves; h++) {
        if (8 * h >= rows) continue;
        to.v[i][h].template load<true>(gate_up + (16 * h + i) * inter + begin, inter - begin - expand_chunk());
      }
    }
  }
  // The slot's first 32 columns of t, which all tiles need.
  __device__ __forceinline__ void load(Shrunk& to) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int h = 0; h < Halves; h++) {
        to.v[i][h] = load_fresh(t + (16 * h + i) * rank, 8 * h < rows && expand_chunk() < rank);
      }
    }
  }

  __device__ __forceinline__ void activate(const AdapterEntry (&entry)[2], int begin, Base& base, const Shrunk& shrunk,
                                           const ExpandRing<2>& ring, int stage) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      ExpandWarp<Halves> sums;
      sums.b = b - expand_chunk() + (i * inter + begin) * rank, sums.ldb = rank;
      sums.t = t - expand_chunk() + i * rank, sums.ldt = 2 * rank;
      sums.columns = inter - begin - expand_column(), sums.rows = rows;
#pragma unroll
      for (int h = 0; h < Halves; h++) sums.x[h] = shrunk.v[i][h];
      sums.finish(entry[i].rank, ring, stage, i);
      // The activation's operands have Element's precision, which base has.
      if (entry[i].rank == 0) continue;
#pragma unroll
      for (int h = 0; h < Halves; h++) base.v[i][h].add(entry[i].scale, sums, h);
    }
    const int there = inter - begin - expand_chunk();
#pragma unroll
    for (int h = 0; h < Halves; h++) {
      const int part_rows = rows + expand_row() - h * kExpandHalf;
      Element* const to = act + begin + (h * kExpandHalf - expand_row()) * inter;
      if (Halves == 1 && part_rows <= 2) {
        activate_rows<kActivation, 4>(base.v[0][h], base.v[1][h], to, inter, part_rows, there);
      } else if (Halves == 1 && part_rows <= 4) {
        activate_rows<kActivation, 2>(base.v[0][h], base.v[1][h], to, inter, part_rows, there);
      } else {
        activate_rows<kActivation, 1>(base.v[0][h], base.v[1][h], to, inter, part_rows, there);
      }
    }
  }
};

// Blocks (columns, parts of the segment, segment). Segments of the base model only activate.
template <Activation kActivation, int Halves>
__global__ void __launch_bounds__(kExpandThreads, Halves == 1 ? 4 : 3)
    activate_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const Element* t,
                    const Element* gate_up, Element* act) {
  using Rows = AdaptedRows<kActivation, Halves>;
  constexpr int kRows = Halves * kExpandHalf;
  __shared__ ExpandRing<2> ring;
  let_next_kernel_begin();
  const AdapterSegment segment = segments.at(blockIdx.z);
  const int inter = static_cast<int>(w.columns[0]), chunk = expand_chunk();
  const int step = static_cast<int>(gridDim.x) * kExpandWarps * kExpandColumns;
  const int first_tile = static_cast<int>(blockIdx.x * kExpandWarps + threadIdx.x / 32) * kExpandColumns;
  if (segment.slot < 0) {
    wait_for_kernel_before();
    // Blocks of one part have all rows, which are loaded together.
    if (blockIdx.y > 0) return;
    for (int begin = first_tile; begin < inter; begin += step) {
      const int64_t first = int64_t{segment.first} * inter;
      activate_base<kActivation>(gate_up + 2 * first + begin + chunk, act + first + begin + chunk, inter, segment.rows,
                                 inter - begin - chunk);
    }
    return;
  }
  if (segment.rows <= static_cast<int>(blockIdx.y) * kRows) return wait_for_kernel_before();
  AdapterEntry entry[2];
#pragma unroll
  for (int i = 0; i < 2; i++) entry[i] = adapter_entry(w, segment.slot, i);
  for (int part = static_cast<int>(blockIdx.y) * kRows; part < segment.rows; part += gridDim.y * kRows) {
    const int64_t first = segment.first + part + expand_row();
    const Rows rows{w.b + int64_t{segment.slot} * 2 * inter * w.rank + expand_column() * w.rank + chunk,
                    t + first * 2 * w.rank + chunk,
                    gate_up + first * 2 * inter + chunk,
                    act + first * inter + chunk,
                    inter,
                    w.rank,
                    min(segment.rows - part, kRows) - expand_row()};
#pragma unroll
    for (int stage = 0; stage < ring.kStages; stage++) rows.fetch_b(ring, stage, first_tile + stage * step);
    wait_for_kernel_before();
    typename Rows::Shrunk shrunk;
    typename Rows::Base now, next;
    rows.load(shrunk);
    rows.load(now, first_tile);
    int stage = 0;
    for (int begin = first_tile; begin < inter; begin += step, stage = (stage + 1) % ring.kStages) {
      if (begin + step < inter) rows.load(next, begin + step);
      ring.wait();
      rows.activate(entry, begin, now, shrunk, ring, stage);
      __syncwarp();
      rows.fetch_b(ring, stage, begin + ring.kStages * step);
      now = next;
    }
    if (Halves == 1) break;  // no segment of the step has more rows
  }
}

template <Activation kActivation, int Halves>
void launch(const AdapterWeights& w, const AdapterSegments& s, const Element* t, const Element* gate_up, Element* act,
            cudaStream_t stream) {
  constexpr int kRows = Halves * kExpandHalf;
  constexpr int64_t kColumns = kExpandWarps * kExpandColumns;
  const bool wide = s.rows >= kWideActivateFrom;
  const int parts = wide ? 1 : std::max(1, (s.most_rows + kRows - 1) / kRows), segments = s.count + s.base_count;
  const int64_t tiles = (w.columns[0] + kColumns - 1) / kColumns;
  const int64_t filled = std::min(segments * parts, segments + s.rows / kRows);
  const dim3 grid(wide ? static_cast<unsigned>(tiles) : expand_blocks(tiles, filled), parts, segments);
  launch_early(activate_kernel<kActivation, Halves>, true, grid, kExpandThreads, stream,
               "launch of the adapters' activation", w, SegmentsParameter(s, segments), t, gate_up, act);
}

}  // namespace

bool adapter_activates(const AdapterWeights& w, const Element* gate_up, const Element* act) {
  return w.columns[0] % 8 == 0 && reinterpret_cast<uintptr_t>(gate_up) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(act) % 16 == 0;
}

void adapter_activate(Activation activation, const AdapterWeights& w, const AdapterSegments& s, const Element* t,
                      const Element* gate_up, Element* act, cudaStream_t stream) {
  if (s.count + s.base_count == 0) return;
  const bool half = s.most_rows <= kExpandHalf;
  if (activation == Activation::kSilu) {
    (half ? launch<Activation::kSilu, 1> : launch<Activation::kSilu, 2>)(w, s, t, gate_up, act, stream);
  } else {
    (half ? launch<Activation::kGeluTanh, 1> : launch<Activation::kGeluTanh, 2>)(w, s, t, gate_up, act, stream);
  }
}

void prepare_adapter_activate() {
  load_kernels("loading a kernel of the adapters", activate_kernel<Activation::kSilu, 1>,
               activate_kernel<Activation::kSilu, 2>, activate_kernel<Activation::kGeluTanh, 1>,
               activate_kernel<Activation::kGeluTanh, 2>);
}

}  // namespace refit::cuda
