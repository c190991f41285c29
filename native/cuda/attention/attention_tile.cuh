// Code that the attention kernels share. The narrow and the wide one do the same arithmetic per row, in the same order:
// tiles of keys ascending; the maximum over a tile; the old sums scaled; then products of 16 keys at a time, ascending.
// A column that a row must not see has exactly the weight 0, and a tile or chunk of such columns only does not change
// the row's sums. So a row's bits do not depend on the kernel, on the other rows, or on how work was split. (A row
// whose own sequence has an infinity or NaN at a later position of the same step may become NaN, too.)
//
// The Hopper kernel (attention_hopper.cu) takes the place of the wide one on its GPUs. For it the same holds, but its
// rows have other bits than the narrow kernel's: its tiles and chunks are larger, wgmma adds in an order of its own,
// and weights are added before they are rounded to Element.
//
// The online softmax over tiles is FlashAttention-2's (Dao, 2023).
#pragma once
#include <cstdint>

#include "cuda/attention/attention.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/device/shared_address.cuh"
#include "cuda/device/types.h"
#include "cuda/gemm/gemm_mma.cuh"

namespace refit::cuda {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / 32;

struct AttentionArgs {
  const Element* q;
  int64_t ldq;
  const AttentionItem* items;
  const int32_t* pages;
  const Element* k;
  const Element* v;
  float* parts;
  Element* out;
  int heads, kv_heads, group, page_size, head_dim;
  float scale;  // for scores, times log2(e): the softmax uses powers of 2
  const AttentionMember* members;
};

// D: head_dim, rounded up. In shared memory the distance between rows of K and V is an odd number of 16-byte pieces, so
// the eight rows of a matrix are in different banks.
template <int D>
struct AttentionShape {
  static constexpr int kTile = D <= 128 ? 64 : 32;  // keys
  static constexpr int kStages = D <= 64 ? 3 : 2;
  static constexpr int kPitch = D * 2 + 16;  // bytes
  static constexpr int kStageBytes = 2 * kTile * kPitch;
  static constexpr int kTilesPerChunk = kAttentionChunk / kTile;
  static constexpr int kRowSlots = 4;
  static constexpr int kStreamBytes = kStages * kStageBytes + kRowSlots * kTile * 4;
  static_assert(kStages < kRowSlots && kTile <= kAttentionThreads && kAttentionChunk % kTile == 0);
};

// Like load_matrices, with each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Element2 pair = to_elements(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
// The value that is subtracted from scores; for a row without keys so far it must not lead to inf - inf.
__device__ __forceinline__ float base_of(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// The keys of an item or a prefix. Tiles are counted from the beginning of its first chunk.
struct KeyTiles {
  int table, end;          // where its page table begins; end of the keys
  int old;                 // keys before this one are not written by this step; for an item of the narrow kernel
  int chunk, from, until;  // tiles [from, until), or less
};
template <int D>
__device__ __forceinline__ KeyTiles tiles_of(const AttentionItem& item) {
  using Shape = AttentionShape<D>;
  return {item.table, item.position + item.tokens, item.old,
          item.chunk, item.skip / Shape::kTile,    item.chunks * Shape::kTilesPerChunk};
}
template <int D>
__device__ __forceinline__ KeyTiles tiles_of(const AttentionPrefix& prefix) {
  return {prefix.table, prefix.keys, prefix.keys, prefix.chunk, 0, prefix.chunks * AttentionShape<D>::kTilesPerChunk};
}

// The tiles of one item or prefix, loaded ahead of their use. Keys from `end` on become zeros, so the contents of
// unused slots do not matter. All threads of the block make the same calls. The first tiles are loaded while the kernel
// before still runs, as far as their keys are old; the constructor returns when that kernel has ended.
template <int D>
class KvStream {
  using Shape = AttentionShape<D>;

 public:
  // `shared`: kStreamBytes.
  __device__ KvStream(const AttentionArgs& args, const KeyTiles& tiles, int head, uint8_t* shared)
      : a_(args),
        pages_(args.pages + tiles.table),
        rows_(reinterpret_cast<int32_t*>(shared + Shape::kStages * Shape::kStageBytes)),
        stages_(shared_address(shared)),
        head_(head),
        end_(tiles.end),
        first_(tiles.chunk * Shape::kTilesPerChunk) {
    const int seen = (end_ + Shape::kTile - 1) / Shape::kTile - first_;
    count = min(seen, tiles.until);
    for (int i = 0; i < Shape::kStages; ++i) keep_row(tiles.from + i, row_of(tiles.from + i));
    __syncthreads();
    for (int i = tiles.from; i < tiles.from + Shape::kStages - 1; ++i) {
      if (first_key(i) + Shape::kTile > tiles.old) wait_for_kernel_before();
      load(i);
    }
    wait_for_kernel_before();
  }

  // Waits for tile i and starts the load of a later one.
  __device__ void begin(int i) {
    wait_async<Shape::kStages - 2>();
    __syncthreads();
    load(i + Shape::kStages - 1);
    next_ = row_of(i + Shape::kStages);
  }
  // Called late: the read of the page table has had the time of a whole tile.
  __device__ void finish(int i) { keep_row(i + Shape::kStages, next_); }

  __device__ int first_key(int i) const { return (first_ + i) * Shape::kTile; }
  __device__ uint32_t k(int i) const { return stages_ + i % Shape::kStages * Shape::kStageBytes; }
  __device__ uint32_t v(int i) const { return k(i) + Shape::kTile * Shape::kPitch; }

  int count;  // end of the tiles

 private:
  // The cache row of this thread's key in tile i, in units of head_dim elements; -1: none.
  __device__ int32_t row_of(int i) const {
    const int key = first_key(i) + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= Shape::kTile || i >= count || key >= end_) return -1;
    const int page = key / a_.page_size;
    return (pages_[page] * a_.kv_heads + head_) * a_.page_size + (key - page * a_.page_size);
  }
  __device__ void keep_row(int i, int32_t row) {
    if (static_cast<int>(threadIdx.x) < Shape::kTile) rows_[i % Shape::kRowSlots * Shape::kTile + threadIdx.x] = row;
  }

  // Always commits one group of copies, even an empty one.
  __device__ void load(int i) {
    if (i < count) {
      constexpr int kPieces = D / 8;  // of 16 bytes in a row
      const int32_t* rows = rows_ + i % Shape::kRowSlots * Shape::kTile;
#pragma unroll
      for (int n = threadIdx.x; n < Shape::kTile * kPieces; n += kAttentionThreads) {
        const int row = n / kPieces, piece = n % kPieces;
        const int32_t at = rows[row];
        const bool there = at >= 0 && piece * 8 < a_.head_dim;
        const int64_t offset = there ? static_cast<int64_t>(at) * a_.head_dim + piece * 8 : 0;
        const uint32_t to = k(i) + row * Shape::kPitch + piece * 16;
        copy_async(to, a_.k + offset, there ? 16 : 0);
        copy_async(to + Shape::kTile * Shape::kPitch, a_.v + offset, there ? 16 : 0);
      }
    }
    commit_async();
  }

  const AttentionArgs& a_;
  const int32_t* pages_;
  int32_t* rows_;
  uint32_t stages_;
  int head_, end_, first_;
  int32_t next_ = -1;
};

// The place of row r of an item's tile: a token and a query head of the KV head's group.
struct AttentionRow {
  int token, head, position;
  bool there;
};

__device__ __forceinline__ AttentionRow row_at(const AttentionArgs& a, const AttentionItem& item, int kv_head, int r) {
  const bool there = r < item.tokens * a.group;
  // Padding rows copy the last row, so only tiles at the diagonal need a mask.
  if (!there) r = item.tokens * a.group - 1;
  const int token = r / a.group;
  return {item.first_token + token, kv_head * a.group + (r - token * a.group), item.position + token, there};
}

// Q of rows r0 and r0 + 8 as operands of mma; zeros beyond head_dim and for padding rows.
template <int D>
__device__ __forceinline__ void load_q(const AttentionArgs& a, const AttentionRow (&rows)[2],
                                       uint32_t (&q)[D / 16][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Element* from = a.q + rows[r].token * a.ldq + static_cast<int64_t>(rows[r].head) * a.head_dim;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = step * 16 + half * 8 + t * 2;
        const bool there = rows[r].there && column < a.head_dim;
        q[step][half * 2 + r] = there ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
      }
    }
  }
}

// Weights of a tile's columns for one row, given the row's maximum over them; returns the factor for the old sums.
__device__ __forceinline__ float advance(float& maximum, float tile_maximum, float scale, float& base) {
  const float now = fmaxf(maximum, __fmul_rn(tile_maximum, scale));
  base = base_of(now);
  const float keep = power_of_2(maximum - base);
  maximum = now;
  return keep;
}
__device__ __forceinline__ float weight_of(float score, float scale, float base) {
  return power_of_2(__fmaf_rn(score, scale, -base));
}

// Adds the next chunk's sums to the sums so far: sums = sums * keep + next * add.
struct ChunkFactors {
  float keep, add;
};
__device__ __forceinline__ ChunkFactors combine(float& maximum, float next) {
  const float now = fmaxf(maximum, next), base = base_of(now);
  const ChunkFactors f{power_of_2(maximum - base), power_of_2(next - base)};
  maximum = now;
  return f;
}
__device__ __forceinline__ float combined(float sum, float next, const ChunkFactors& f) {
  return __fmaf_rn(next, f.add, __fmul_rn(sum, f.keep));
}

// Partial results of one row: head_dim sums, the maximum, the sum of weights.
__device__ __forceinline__ float* part_at(const AttentionArgs& a, int64_t part, int head) {
  return a.parts + (part * a.heads + head) * (a.head_dim + 2);
}
__device__ __forceinline__ float* part_of(const AttentionArgs& a, const AttentionItem& item, const AttentionRow& row) {
  return part_at(a, item.part + (row.token - item.first_token), row.head);
}
__device__ __forceinline__ Element* out_of(const AttentionArgs& a, const AttentionRow& row) {
  return a.out + (static_cast<int64_t>(row.token) * a.heads + row.head) * a.head_dim;
}
__device__ __forceinline__ void put_result(Element* to, float x, float y, float inverse) {
  put_pair(to, __fmul_rn(x, inverse), __fmul_rn(y, inverse));
}

}  // namespace refit::cuda
