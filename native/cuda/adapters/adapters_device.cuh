// Shared by the kernels of adapters: what the table says of a slot, and loads of 8 adjacent elements.
#pragma once
#include "cuda/adapters/adapters.h"
#include "cuda/gemm/gemm_mma.cuh"

namespace refit::cuda {

// Segments as a parameter of a kernel, which saves it a read of memory before all others.
struct SegmentsParameter {
  static constexpr int kMost = 64;
  const AdapterSegment* list;  // null: `own` has them all
  AdapterSegment own[kMost];

  SegmentsParameter(const AdapterSegments& s, int count) : list(s.host == nullptr || count > kMost ? s.list : nullptr) {
    for (int i = 0; list == nullptr && i < count; i++) own[i] = s.host[i];
  }
  __device__ __forceinline__ AdapterSegment at(unsigned i) const { return list == nullptr ? own[i] : list[i]; }
};

struct AdapterEntry {
  float scale;
  int rank;  // rounded up to 16: the columns of A's product that count; 0: none
};

// rank: of the slot. A rank beyond it would read another slot's rows.
__device__ __forceinline__ AdapterEntry adapter_entry(float2 entry, int rank) {
  return {entry.x, min((static_cast<int>(entry.y) + 15) / 16 * 16, rank)};
}
__device__ __forceinline__ AdapterEntry adapter_entry(const AdapterWeights& w, int slot, int slice) {
  return adapter_entry(*reinterpret_cast<const float2*>(w.table + slot * w.slot_floats + 2 * slice), w.rank);
}

// The elements [k, k + 8) of a row; zeros from K on, or if the row is null. kFresh: the kernel before may have written
// them; else they are weights.
template <bool kAligned, bool kFresh = false>
__device__ __forceinline__ uint4 adapter_load(const Element* row, int64_t k, int64_t K) {
  const bool there = row != nullptr && k < K;
  if constexpr (kAligned) {
    return kFresh ? load_fresh(row + k, there) : load_kept(row + k, there);
  } else {
    const auto* const bits = reinterpret_cast<const volatile uint16_t*>(row);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t low = there && k + 2 * i < K ? bits[k + 2 * i] : 0;
      const uint32_t high = there && k + 2 * i + 1 < K ? bits[k + 2 * i + 1] : 0;
      word[i] = low | high << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace refit::cuda
