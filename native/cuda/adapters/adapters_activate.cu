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

// Blocks (columns, segment, parts of the segment). Segments of the base model only activate.
template <Activation kActivation, int Halves>
__global__ void __launch_bounds__(kExpandThreads, Halves == 1 ? 4 : 3)
    activate_kernel(AdapterWeights w, const __grid_constant__ SegmentsParameter segments, const bf16* t,
                    const bf16* gate_up, bf16* act) {
  constexpr int kRows = Halves * kExpandHalf;
  let_next_kernel_begin();
  const AdapterSegment segment = segments.at(blockIdx.y);
  const int64_t inter = w.columns[0];
  const int64_t begin = (int64_t{blockIdx.x} * kExpandWarps + threadIdx.x / 32) * kExpandColumns;
  if (begin >= inter || segment.rows <= static_cast<int>(blockIdx.z) * kRows) return wait_for_kernel_before();
  const int g = threadIdx.x % 32 / 4, own = threadIdx.x % 4 * 8;
  const int64_t there = inter - begin - own, ldt = 2 * int64_t{w.rank};
  const bf16* const b = w.b + (segment.slot * 2 * inter + begin) * w.rank;
  for (int part = blockIdx.z * kRows; part < segment.rows; part += gridDim.z * kRows) {
    const int rows = min(segment.rows - part, kRows);
    const int64_t first = segment.first + part;
    const bf16* const from = gate_up + first * 2 * inter + begin + own;
    ExpandWarp<Halves> sums[2];
    AdapterEntry entry[2] = {{0.0f, 0}, {0.0f, 0}};
    if (segment.slot >= 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sums[i].start(t + first * ldt + i * w.rank, ldt, rows, b + i * inter * w.rank, w.rank, inter - begin);
        entry[i] = adapter_entry(w, segment.slot, i);
      }
    }
    wait_for_kernel_before();
    Eight<bf16> base[2][Halves];  // gate and up, rows g and g + 8
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int h = 0; h < Halves; h++) {
        const int m = h * kExpandHalf + g;
        if (m < rows) base[i][h].template load<true>(from + m * 2 * inter + i * inter, there);
      }
    }
    if (segment.slot >= 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) sums[i].finish(entry[i].rank);
    }
#pragma unroll
    for (int h = 0; h < Halves; h++) {
      const int m = h * kExpandHalf + g;
      if (m >= rows) continue;
      Eight<bf16> out;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          value[i] = as_float(base[i][h].v[e]);
          if (entry[i].rank > 0) value[i] = rounded(__fmaf_rn(entry[i].scale, sums[i].sum(h, e), value[i]));
        }
        out.v[e] = __float2bfloat16_rn(__fmul_rn(rounded(activated_as_cpu<kActivation>(value[0])), value[1]));
      }
      out.template store<true>(act + (first + m) * inter + begin + own, there);
    }
  }
}

template <Activation kActivation, int Halves>
void launch(const AdapterWeights& w, const AdapterSegments& s, const bf16* t, const bf16* gate_up, bf16* act,
            cudaStream_t stream, bool early) {
  constexpr int kRows = Halves * kExpandHalf;
  constexpr int64_t kColumns = kExpandWarps * kExpandColumns;
  const int parts = s.rows >= kWideFrom ? 1 : std::max(1, (s.most_rows + kRows - 1) / kRows);
  const dim3 grid(static_cast<unsigned>((w.columns[0] + kColumns - 1) / kColumns), s.count + s.base_count, parts);
  launch_early(activate_kernel<kActivation, Halves>, early, grid, kExpandThreads, stream,
               "launch of the adapters' activation", w, SegmentsParameter(s, s.count + s.base_count), t, gate_up, act);
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
