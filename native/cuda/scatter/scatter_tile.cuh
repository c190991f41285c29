// Device code of the scatter: finds tiles and copies one with all threads of a group.
#pragma once
#include "cuda/scatter/scatter_kernel.h"
#include "cuda/scatter/scatter_slot.cuh"

namespace refit::cuda {

constexpr int kScatterLoads = 4;  // loads of 16 bytes in flight per thread

// One tile.
struct ScatterJob {
  ScatterCopy copy;
  TileRange range;
  bool end;  // no tile is left
};

// Hands out tiles to one warp of a group; all its lanes call it. A tile number is requested one turn before it is used,
// which hides the latency of the atomic in L2.
class TileFeed {
 public:
  explicit __device__ TileFeed(const ScatterTiles& list) : list_(list) {}

  // Call it before the first next(), by the warp that calls next().
  __device__ void ask() {
    if (threadIdx.x % 32 == 0) next_ = atomicAdd(list_.counter, 1);
  }

  __device__ void next(ScatterJob& job) {
    const uint32_t tile = __shfl_sync(kAll, next_, 0);
    const uint32_t lane = threadIdx.x % 32;
    if (tile >= list_.tiles) {
      if (lane == 0) job.end = true;
      return;
    }
    ask();
    // Tile numbers only rise: search forward from the last copy, first in steps of 32, then of one.
    for (uint32_t passed = 32; passed == 32;) {
      passed = count_begun(copy_ + 32 * (lane + 1), tile);
      copy_ += 32 * passed;
    }
    copy_ += count_begun(copy_ + 1 + lane, tile);
    static_assert(sizeof(ScatterCopy) == 4 * sizeof(uint4));
    if (lane < 4) {
      reinterpret_cast<uint4*>(&job.copy)[lane] = __ldg(reinterpret_cast<const uint4*>(list_.copies + copy_) + lane);
    }
    __syncwarp();
    if (lane == 0) {
      job.range = tile_range(job.copy, tile - __ldg(list_.first_tile + copy_));
      job.end = false;
    }
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  // The number of lanes whose copies begin at or before the tile; these are the first lanes.
  __device__ uint32_t count_begun(uint32_t copy, uint32_t tile) const {
    const bool begun = copy < list_.count && __ldg(list_.first_tile + copy) <= tile;
    return __popc(__ballot_sync(kAll, begun));
  }

  const ScatterTiles list_;
  uint32_t next_ = 0;
  uint32_t copy_ = 0;
};

// Walks over rows x slots in steps of `step`, row by row.
struct Walk {
  __device__ Walk(uint32_t first, uint32_t step, uint32_t slots)
      : row(first / slots), slot(first % slots), row_step(step / slots), slot_step(step % slots), slots(slots) {}
  __device__ void next() {
    row += row_step;
    slot += slot_step;
    if (slot >= slots) {
      slot -= slots;
      row++;
    }
  }
  uint32_t row, slot;
  const uint32_t row_step, slot_step, slots;
};

// Copies a tile whose rows are not adjacent.
template <int kThreads>
__device__ __forceinline__ void copy_vector_rows(uint64_t src, uint64_t dst, uint64_t src_row, uint32_t dst_row,
                                                 uint32_t rows, uint32_t slots, uint32_t thread) {
  Walk walk(thread, kThreads, slots);
#pragma unroll 1
  while (walk.row < rows) {
    uint4 v[kScatterLoads];
    uint64_t to[kScatterLoads];
#pragma unroll
    for (int u = 0; u < kScatterLoads; u++) {
      to[u] = 0;
      if (walk.row < rows) {
        v[u] = load_vector(src + walk.row * src_row + static_cast<uint64_t>(walk.slot) * 16);
        to[u] = dst + walk.row * static_cast<uint64_t>(dst_row) + static_cast<uint64_t>(walk.slot) * 16;
      }
      walk.next();
    }
#pragma unroll
    for (int u = 0; u < kScatterLoads; u++) {
      if (to[u] != 0) store_vector(to[u], v[u]);
    }
  }
}

template <int kThreads>
__device__ __forceinline__ void copy_vector_run(uint64_t src, uint64_t dst, uint32_t slots, uint32_t thread) {
  constexpr uint32_t kPass = kThreads * kScatterLoads;
  src += static_cast<uint64_t>(thread) * 16;
  dst += static_cast<uint64_t>(thread) * 16;
  // Whole passes need no check for the end.
#pragma unroll 1
  for (; slots >= kPass; slots -= kPass, src += kPass * 16, dst += kPass * 16) {
    uint4 v[kScatterLoads];
#pragma unroll
    for (int u = 0; u < kScatterLoads; u++) v[u] = load_vector(src + u * kThreads * 16);
#pragma unroll
    for (int u = 0; u < kScatterLoads; u++) store_vector(dst + u * kThreads * 16, v[u]);
  }
  uint4 v[kScatterLoads];
#pragma unroll
  for (int u = 0; u < kScatterLoads; u++) {
    if (thread + u * kThreads < slots) v[u] = load_vector(src + u * kThreads * 16);
  }
#pragma unroll
  for (int u = 0; u < kScatterLoads; u++) {
    if (thread + u * kThreads < slots) store_vector(dst + u * kThreads * 16, v[u]);
  }
}

template <int kThreads>
__device__ __forceinline__ void copy_vectors(const ScatterJob& job, uint32_t thread) {
  const auto src_row = static_cast<uint64_t>(job.copy.src_row);
  const uint32_t dst_row = job.copy.dst_row;
  const uint64_t src = job.copy.src + job.range.row * src_row + static_cast<uint64_t>(job.range.slot) * 16;
  const uint64_t dst =
      job.copy.dst + job.range.row * static_cast<uint64_t>(dst_row) + static_cast<uint64_t>(job.range.slot) * 16;
  if (job.range.rows == 1) {
    copy_vector_run<kThreads>(src, dst, job.range.slots, thread);
  } else {
    copy_vector_rows<kThreads>(src, dst, src_row, dst_row, job.range.rows, job.range.slots, thread);
  }
}

// The paths below are separate functions, because inlining them would cost the path above registers.
template <int kThreads, DType kType, bool kGathered>
__device__ __noinline__ void copy_slots(const ScatterJob& job, uint32_t thread) {
  for (Walk walk(thread, kThreads, job.range.slots); walk.row < job.range.rows; walk.next()) {
    copy_slot<kType, kGathered>(job.copy, job.range.row + walk.row, job.range.slot + walk.slot);
  }
}

// 66 elements per row: neither writing a column nor reading rows causes bank conflicts.
struct TransposeTile {
  static constexpr uint32_t kCols = kTransposeSlots * 8;
  alignas(4) uint16_t at[kTransposeRows][kCols + 2];
};

// Lanes run along rows when they read, as the source does, and along columns when they write. `sync` waits for all
// threads of the group.
template <int kThreads, DType kType, typename Sync>
__device__ __noinline__ void transpose(const ScatterJob& job, uint32_t thread, TransposeTile& tile, Sync sync) {
  const ScatterCopy& copy = job.copy;
  const uint64_t col = static_cast<uint64_t>(job.range.slot) * 8;
  const auto cols = static_cast<uint32_t>(min(static_cast<uint64_t>(TransposeTile::kCols), copy.cols - col));
  const uint64_t src =
      copy.src + job.range.row * static_cast<uint64_t>(copy.src_row) + col * static_cast<uint64_t>(copy.src_col);
#pragma unroll 4
  for (uint32_t i = thread; i < kTransposeRows * TransposeTile::kCols; i += kThreads) {
    const uint32_t r = i % kTransposeRows, c = i / kTransposeRows;
    if (r < job.range.rows && c < cols) {
      tile.at[r][c] = static_cast<uint16_t>(
          load_element<kType>(src + r * static_cast<uint64_t>(copy.src_row) + c * static_cast<uint64_t>(copy.src_col)));
    }
  }
  sync();
  const uint64_t dst = copy.dst + job.range.row * static_cast<uint64_t>(copy.dst_row) + col * 2;
  for (uint32_t i = thread; i < kTransposeRows * kTransposeSlots; i += kThreads) {
    const uint32_t r = i / kTransposeSlots, c = i % kTransposeSlots * 8;
    if (r >= job.range.rows || c >= cols) continue;
    const uint64_t to = dst + r * static_cast<uint64_t>(copy.dst_row) + c * 2;
    const uint16_t* from = &tile.at[r][c];
    if (c + 8 <= cols && to % 16 == 0) {
      const auto* words = reinterpret_cast<const uint32_t*>(from);
      store_vector(to, {words[0], words[1], words[2], words[3]});
    } else {
      const uint32_t count = min(8u, cols - c);
      for (uint32_t k = 0; k < count; k++) reinterpret_cast<uint16_t*>(to)[k] = from[k];
    }
  }
}

template <int kThreads, DType kType, typename Sync>
__device__ __forceinline__ void copy_tile_of(const ScatterJob& job, uint32_t thread, TransposeTile& tile, Sync sync) {
  if (job.copy.path == ScatterPath::kRows) {
    copy_slots<kThreads, kType, false>(job, thread);
  } else if (job.copy.path == ScatterPath::kGather) {
    copy_slots<kThreads, kType, true>(job, thread);
  } else {
    transpose<kThreads, kType>(job, thread, tile, sync);
  }
}

// For the dtype of the copy, which is `kFirst` or a later one.
template <int kThreads, size_t kFirst, typename Sync>
__device__ __forceinline__ void copy_tile_from(const ScatterJob& job, uint32_t thread, TransposeTile& tile, Sync sync) {
  if constexpr (kFirst + 1 < kDTypes) {
    if (job.copy.dtype != static_cast<DType>(kFirst)) {
      copy_tile_from<kThreads, kFirst + 1>(job, thread, tile, sync);
      return;
    }
  }
  copy_tile_of<kThreads, static_cast<DType>(kFirst)>(job, thread, tile, sync);
}

template <int kThreads, typename Sync>
__device__ __forceinline__ void copy_tile(const ScatterJob& job, uint32_t thread, TransposeTile& tile, Sync sync) {
  if (job.copy.path == ScatterPath::kVector) {
    copy_vectors<kThreads>(job, thread);
  } else {
    copy_tile_from<kThreads, 0>(job, thread, tile, sync);
  }
}

}  // namespace refit::cuda
