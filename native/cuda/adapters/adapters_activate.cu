// The adapters' part of gate and up together with the activation, which reads both: one pass over the base products
// instead of two.
#include <algorithm>

#include "cuda/adapters/adapters_expand.cuh"
#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

// From so many rows on, a block takes all rows of a segment.
constexpr int kWideFrom = 512;

template <Activation kActivation>
__device__ __forceinline__ bf16 activated(float gate, float up) {
  return __float2bfloat16_rn(__fmul_rn(rounded(activated_as_cpu<kActivation>(gate)), up));
}

// One tile of columns of all rows of a segment of the base model: from and act begin at this thread's first column of
// the segment's first row.
template <Activation kActivation>
__device__ __forceinline__ void activate_base(const bf16* from, bf16* act, int64_t inter, int rows, int64_t there) {
  constexpr int kTogether = 4;
  for (int begin = threadIdx.x % 32 / 4; begin < rows; begin += kTogether * kExpandHalf) {
    Eight<bf16> gate[kTogether], up[kTogether];
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

// The lower or the upper bf16 of a word.
__device__ __forceinline__ float half_of(uint32_t word, int half) {
  return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
}

// Stores the activation of at most 8 / Lanes rows, of which the first lanes have 8 columns each. The exponential and
// the division take most of the instructions, so `Lanes` lanes compute them for each of these. All lanes call it. act:
// at this thread's first column.
template <Activation kActivation, int Lanes>
__device__ __forceinline__ void activate_rows(const Eight<bf16>& gate, const Eight<bf16>& up, bf16* act, int64_t inter,
                                              int rows, int64_t there) {
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
    const __nv_bfloat162 pair =
        __halves2bfloat162(activated<kActivation>(half_of(own[0][i], 0), half_of(own[1][i], 0)),
                           activated<kActivation>(half_of(own[0][i], 1), half_of(own[1][i], 1)));
    out[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  bf16* const to = act + row * inter + 2 * kPairs * part;
  if constexpr (Lanes == 1) store_16(to, make_uint4(out[0], out[1], out[2], out[3]));
  if constexpr (Lanes == 2) *reinterpret_cast<uint2*>(to) = make_uint2(out[0], out[1]);
  if constexpr (Lanes == 4) *reinterpret_cast<uint32_t*>(to) = out[0];
}

// The same for at most 8 * Halves rows of an adapter, with t's first row and B's row of the tile's first column.
template <Activation kActivation, int Halves>
__device__ __forceinline__ void activate_adapted(const AdapterWeights& w, const AdapterEntry (&entry)[2], const bf16* b,
                                                 const bf16* t, const bf16* from, bf16* act, int rows, int64_t left,
                                                 const ExpandRing<2>& ring, int stage) {
  const int g = threadIdx.x % 32 / 4, own = threadIdx.x % 4 * 8;
  const int64_t inter = w.columns[0], there = left - own, ldt = 2 * int64_t{w.rank};
  Eight<bf16> base[2][Halves];  // gate and up, rows g and g + 8
  ExpandWarp<Halves> sums[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int h = 0; h < Halves; h++) {
      const int m = h * kExpandHalf + g;
      if (m < rows) base[i][h].template load<true>(from + m * 2 * inter + i * inter, there);
    }
    sums[i].place(t + i * w.rank, ldt, rows, b + i * inter * w.rank, w.rank, left);
    sums[i].load_t(own, w.rank);
  }
  ring.wait();
#pragma unroll
  for (int i = 0; i < 2; i++) sums[i].finish(entry[i].rank, ring, stage, i);
#pragma unroll
  for (int h = 0; h < Halves; h++) {
    // The activation's operands have bf16's precision.
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (entry[i].rank == 0) continue;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        put(&base[i][h].v[e], __fmaf_rn(entry[i].scale, sums[i].sum(h, e), as_float(base[i][h].v[e])));
      }
    }
    const int part_rows = rows - h * kExpandHalf;
    bf16* const to = act + h * kExpandHalf * inter;
    if (Halves == 1 && part_rows <= 2) {
      activate_rows<kActivation, 4>(base[0][h], base[1][h], to, inter, part_rows, there);
    } else if (Halves == 1 && part_rows <= 4) {
      activate_rows<kActivation, 2>(base[0][h], base[1][h], to, inter, part_rows, there);
    } else {
      activate_rows<kActivation, 1>(base[0][h], base[1][h], to, inter, part_rows, there);
    }
  }
}

// Blocks (columns, segment, parts of the segment). Segments of the base model only activate.
template <Activation kActivation, int Halves>
__global__ void __launch_bounds__(kExpandThreads, Halves == 1 ? 4 : 3)
    activate_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const bf16* t,
                    const bf16* gate_up, bf16* act) {
  constexpr int kRows = Halves * kExpandHalf;
  __shared__ ExpandRing<2> ring;
  let_next_kernel_begin();
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int64_t inter = w.columns[0], tile = threadIdx.x / 32 * kExpandColumns, own = threadIdx.x % 4 * 8;
  const int64_t first_tile = int64_t{blockIdx.x} * kExpandWarps * kExpandColumns + tile;
  const int64_t step = int64_t{gridDim.x} * kExpandWarps * kExpandColumns;
  if (segment.slot < 0) {
    wait_for_kernel_before();
    // Blocks of one part have all rows, which are loaded together.
    if (blockIdx.z > 0) return;
    for (int64_t begin = first_tile; begin < inter; begin += step) {
      activate_base<kActivation>(gate_up + segment.first * 2 * inter + begin + own,
                                 act + segment.first * inter + begin + own, inter, segment.rows, inter - begin - own);
    }
    return;
  }
  if (segment.rows <= static_cast<int>(blockIdx.z) * kRows) return wait_for_kernel_before();
  const bf16* const b = w.b + int64_t{segment.slot} * 2 * inter * w.rank;
  const auto fetch = [&](int stage, int64_t begin) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (begin < inter) ring.copy(stage, i, b + (i * inter + begin) * w.rank, w.rank, inter - begin);
    }
    commit_async();
  };
  AdapterEntry entry[2];
#pragma unroll
  for (int i = 0; i < 2; i++) entry[i] = adapter_entry(w, segment.slot, i);
  for (int part = blockIdx.z * kRows; part < segment.rows; part += gridDim.z * kRows) {
    const int64_t first = segment.first + part;
#pragma unroll
    for (int stage = 0; stage < ring.kStages; stage++) fetch(stage, first_tile + stage * step);
    wait_for_kernel_before();
    int stage = 0;
    for (int64_t begin = first_tile; begin < inter; begin += step, stage = (stage + 1) % ring.kStages) {
      activate_adapted<kActivation, Halves>(
          w, entry, b + begin * w.rank, t + first * 2 * w.rank, gate_up + first * 2 * inter + begin + own,
          act + first * inter + begin + own, min(segment.rows - part, kRows), inter - begin, ring, stage);
      __syncwarp();
      fetch(stage, begin + ring.kStages * step);
    }
    if (Halves == 1) break;  // no segment of the step has more rows
  }
}

template <Activation kActivation, int Halves>
void launch(const AdapterWeights& w, const AdapterSegments& s, const bf16* t, const bf16* gate_up, bf16* act,
            cudaStream_t stream, bool early) {
  constexpr int kRows = Halves * kExpandHalf;
  constexpr int64_t kColumns = kExpandWarps * kExpandColumns;
  const bool wide = s.rows >= kWideFrom;
  const int parts = wide ? 1 : std::max(1, (s.most_rows + kRows - 1) / kRows), segments = s.count + s.base_count;
  const int64_t tiles = (w.columns[0] + kColumns - 1) / kColumns;
  const int64_t filled = std::min(segments * parts, segments + s.rows / kRows);
  const dim3 grid(wide ? static_cast<unsigned>(tiles) : expand_blocks(tiles, filled), segments, parts);
  launch_early(activate_kernel<kActivation, Halves>, early, grid, kExpandThreads, stream,
               "launch of the adapters' activation", w, SegmentsParameter(s, segments), t, gate_up, act);
}

}  // namespace

bool adapter_activates(const AdapterWeights& w, const bf16* gate_up, const bf16* act) {
  return w.columns[0] % 8 == 0 && reinterpret_cast<uintptr_t>(gate_up) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(act) % 16 == 0;
}

void adapter_activate(Activation activation, const AdapterWeights& w, const AdapterSegments& s, const bf16* t,
                      const bf16* gate_up, bf16* act, cudaStream_t stream, bool early) {
  if (s.count + s.base_count == 0) return;
  const bool half = s.most_rows <= kExpandHalf;
  if (activation == Activation::kSilu) {
    (half ? launch<Activation::kSilu, 1> : launch<Activation::kSilu, 2>)(w, s, t, gate_up, act, stream, early);
  } else {
    (half ? launch<Activation::kGeluTanh, 1> : launch<Activation::kGeluTanh, 2>)(w, s, t, gate_up, act, stream, early);
  }
}

void prepare_adapter_activate() {
  const auto prepare = [](auto kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of the adapters");
  };
  prepare(activate_kernel<Activation::kSilu, 1>);
  prepare(activate_kernel<Activation::kSilu, 2>);
  prepare(activate_kernel<Activation::kGeluTanh, 1>);
  prepare(activate_kernel<Activation::kGeluTanh, 2>);
}

}  // namespace refit::cuda
