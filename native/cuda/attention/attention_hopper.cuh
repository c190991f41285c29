// The Hopper kernels: the layout and the work that producer and consumers share, and the producer.
#pragma once
#include "cuda/attention/attention_tile.cuh"
#include "cuda/gemm/hopper.cuh"

namespace refit::cuda {

constexpr int kWarpgroup = 128;  // threads
constexpr int kHopperThreads = 3 * kWarpgroup;

// Shared memory, in bytes. A tile has 128 rows of Q, K or V. Its columns are cut into halves of 64 (128 bytes), one
// behind the other, each swizzled by 128 bytes.
template <int D>
struct HopperShape {
  static constexpr int kTile = 128;
  static constexpr int kStages = 2;
  static constexpr int kHalf = kTile * 128;
  static constexpr int kTileBytes = D / 64 * kHalf;
  static constexpr int kPieces = D / 8;  // of 16 bytes in a row
  // A consumer warp keeps its 16 rows' sums over the chunks before here, later its results.
  static constexpr int kBeforeBytes = 16 * D * 4;
  static constexpr int kKAt = kTileBytes;
  static constexpr int kVAt = kKAt + kStages * kTileBytes;
  static constexpr int kBeforeAt = kVAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kBeforeAt + 8 * kBeforeBytes;
  static constexpr int kBytes = kBarriersAt + (2 + 4 * kStages) * 8;
  static_assert(D == 64 || D == 128);
  static_assert(kTile == kHopperRows && kTile == kWarpgroup && kBytes <= 227 * 1024);
};

// The block's shared memory. Tiles are numbered over all items of the block; tile n is in stage n % kStages.
template <int D>
struct HopperShared {
  using Shape = HopperShape<D>;
  uint32_t base;

  __device__ uint32_t q() const { return base; }
  __device__ uint32_t k(uint32_t n) const { return base + Shape::kKAt + n % Shape::kStages * Shape::kTileBytes; }
  __device__ uint32_t v(uint32_t n) const { return base + Shape::kVAt + n % Shape::kStages * Shape::kTileBytes; }

  // A full barrier ends a phase when a tile is loaded, an empty one when both consumers have read it.
  __device__ uint32_t barrier(int i) const { return base + Shape::kBarriersAt + i * 8; }
  __device__ uint32_t full_q() const { return barrier(0); }
  __device__ uint32_t empty_q() const { return barrier(1); }
  __device__ uint32_t full_k(uint32_t n) const { return barrier(2 + n % Shape::kStages * 4); }
  __device__ uint32_t empty_k(uint32_t n) const { return barrier(3 + n % Shape::kStages * 4); }
  __device__ uint32_t full_v(uint32_t n) const { return barrier(4 + n % Shape::kStages * 4); }
  __device__ uint32_t empty_v(uint32_t n) const { return barrier(5 + n % Shape::kStages * 4); }
  // Parity of the phase in which tile n is full.
  __device__ static uint32_t parity(uint32_t n) { return n / Shape::kStages & 1; }

  // All threads of the producer, or one thread of each consumer warp, arrive.
  __device__ void init() const {
    for (int i = 0; i < 2 + 4 * Shape::kStages; ++i) barrier_init(barrier(i), i % 2 == 0 ? kWarpgroup : 8);
  }
};

// One item for one KV head.
struct HopperWork {
  AttentionItem item;
  int kv_head, rows;
  int first, count;  // tiles of keys
};

// The same value, known to the compiler as one of the whole warp: descriptors and barriers then need no registers of
// single threads, and wgmma are issued faster.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(~0u, x, 0); }

// The work of this block in round 0, 1, ...; false: there is no more. Items are sorted by size, so every other round
// goes backwards. Work of too few rows has no tiles. Chunk: keys.
template <int D, int Chunk>
__device__ __forceinline__ bool work_at(const AttentionArgs& a, int items, int round, HopperWork& work) {
  using Shape = HopperShape<D>;
  constexpr int kTilesPerChunk = Chunk / Shape::kTile;
  const int blocks = gridDim.x, block = blockIdx.x;
  const int64_t at = static_cast<int64_t>(round) * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  if (at >= static_cast<int64_t>(items) * a.kv_heads) return false;
  const int index = static_cast<int>(at) / a.kv_heads;
  work.item = a.items[index];
  work.kv_head = static_cast<int>(at) - index * a.kv_heads;
  work.rows = of_warp(work.item.tokens * a.group);
  work.first = of_warp(work.item.chunk * kTilesPerChunk);
  const int seen = (work.item.position + work.item.tokens + Shape::kTile - 1) / Shape::kTile - work.first;
  work.count = of_warp(work.rows <= kNarrowRows ? 0 : min(seen, work.item.chunks * kTilesPerChunk));
  return true;
}

// Copies the rows of a tile and arrives at `full`. `row`: of `from`, in units of D elements, for row threadIdx.x of the
// tile; -1 for zeros.
template <int D>
__device__ __forceinline__ void copy_tile(uint32_t to, const Element* from, int32_t row, uint32_t full) {
  constexpr int kPieces = HopperShape<D>::kPieces, kTogether = 32 / kPieces;
  const int lane = threadIdx.x % 32, piece = lane % kPieces;
  int first = lane / kPieces;
  asm volatile("" : "+r"(first));  // else the compiler keeps many sums with it in registers, and has too few
  from += piece * 8;
  to += piece / 8 * HopperShape<D>::kHalf + (threadIdx.x / 32 * 32 + first) * 128;
  const int swizzled = (piece % 8 ^ first) * 16;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int32_t at = __shfl_sync(~0u, row, first + i * kTogether);
    const uint32_t place = to + (swizzled ^ i * kTogether % 8 * 16);
    copy_async(place + i * kTogether * 128, from + static_cast<int64_t>(max(at, 0)) * D, at >= 0 ? 16 : 0);
  }
  barrier_arrive_after_copies(full);
}

// The cache of K or V as tensors of [rows, halves, 64]. The copy engine loads `box_rows` rows of a page and half at a
// time; 0: pages are too small.
struct HopperMaps {
  CUtensorMap k, v;
  int box_rows;
};

// Whether the copy engine loads tile i of an item: all keys exist.
template <int D>
__device__ __forceinline__ bool by_boxes(const HopperMaps& maps, const HopperWork& work, int i) {
  return maps.box_rows != 0 && (work.first + i + 1) * HopperShape<D>::kTile <= work.item.position + work.item.tokens;
}

// The producer's warpgroup: loads Q, then K and V tile by tile. Tiles that the copy engine cannot load are loaded by
// all threads: keys from the end of the sequence on become zeros, so the contents of unused slots do not matter.
template <int D, int Chunk>
class Producer {
  using Shape = HopperShape<D>;
  using Shared = HopperShared<D>;
  static constexpr int kHalves = D / 64;

 public:
  __device__ __forceinline__ Producer(const AttentionArgs& args, const HopperMaps& maps, const Shared& shared)
      : a_(args), maps_(maps), shared_(shared), row_(threadIdx.x), box_(threadIdx.x % 32 * 4 + threadIdx.x / 32) {}

  __device__ __forceinline__ void run(int items) {
    uint32_t tiles = 0, works = 0;
    HopperWork work;
    for (int round = 0; work_at<D, Chunk>(a_, items, round, work); ++round) {
      if (work.count == 0) continue;
      load(work, tiles, works);
      tiles += work.count;
      works++;
    }
  }

 private:
  // The cache row of the key that this thread loads from in tile i; -1: none.
  __device__ __forceinline__ int32_t key_row(const HopperWork& work, int i) const {
    const int own = by_boxes<D>(maps_, work, i) ? box_ / kHalves * maps_.box_rows : row_;
    const int key = (work.first + i) * Shape::kTile + own;
    if (i >= work.count || own >= Shape::kTile || key >= work.item.position + work.item.tokens) return -1;
    const int page = key / a_.page_size;
    return (a_.pages[work.item.table + page] * a_.kv_heads + work.kv_head) * a_.page_size + (key - page * a_.page_size);
  }

  __device__ __forceinline__ void load_tile(uint32_t to, const Element* from, const CUtensorMap& map, bool boxes,
                                            int32_t row, uint32_t full) const {
    if (!boxes) {
      copy_tile<D>(to, from, row, full);
      return;
    }
    // Each warp loads some boxes: the instructions of one thread after the other would take long. The barrier expects a
    // warp's bytes before they can come.
    const int count = __popc(__ballot_sync(~0u, row >= 0));
    if (row_ % 32 == 0) {
      barrier_arrive_and_expect(full, count * maps_.box_rows * 128);
      barrier_arrive(full, 31);
    }
    __syncwarp();
    const int half = box_ % kHalves;
    if (row >= 0) {
      copy_box(to + half * Shape::kHalf + box_ / kHalves * maps_.box_rows * 128, map, full, 0, half, row);
    }
  }

  __device__ __forceinline__ void load(const HopperWork& work, uint32_t tiles, uint32_t works) const {
    // Read one tile ahead: a page table may be far away.
    int32_t here = -1, next = key_row(work, 0);
    barrier_wait(shared_.empty_q(), ~works & 1);
    const AttentionRow q = row_at(a_, work.item, work.kv_head, row_);
    copy_tile<D>(shared_.q(), a_.q, q.there ? q.token * static_cast<int>(a_.ldq / D) + q.head : -1, shared_.full_q());
    for (int i = 0; i <= work.count; ++i) {
      const uint32_t n = tiles + i;
      const int32_t before = here;
      here = next;
      if (i < work.count) {
        next = key_row(work, i + 1);
        barrier_wait(shared_.empty_k(n), ~Shared::parity(n) & 1);
        load_tile(shared_.k(n), a_.k, maps_.k, by_boxes<D>(maps_, work, i), here, shared_.full_k(n));
      }
      if (i > 0) {
        barrier_wait(shared_.empty_v(n - 1), ~Shared::parity(n - 1) & 1);
        load_tile(shared_.v(n - 1), a_.v, maps_.v, by_boxes<D>(maps_, work, i - 1), before, shared_.full_v(n - 1));
      }
    }
  }

  const AttentionArgs& a_;
  const HopperMaps& maps_;
  const Shared& shared_;
  const int row_, box_;  // that this thread loads, of a tile's
};

}  // namespace refit::cuda
