// The part that the consumers of both Hopper kernels share: products, masks and results.
#pragma once
#include "cuda/attention/attention_hopper.cuh"

namespace refit::cuda {

// Maxima and sums of weights of a thread's rows g and g + 8.
struct RowTotal {
  float maximum[2], weights[2];
};

template <int D>
class Consumer {
 protected:
  using Shape = HopperShape<D>;
  using Shared = HopperShared<D>;
  static constexpr int kScores = Shape::kTile / 2;  // registers

 public:
  __device__ __forceinline__ Consumer(const AttentionArgs& args, const HopperMaps& maps, const Shared& shared,
                                      uint8_t* memory)
      : a_(args), maps_(maps), shared_(shared), group_(of_warp(threadIdx.x / kWarpgroup - 1)), lane_(threadIdx.x % 32) {
    const int warp = threadIdx.x % kWarpgroup / 32;
    first_row_ = group_ * 64 + warp * 16;
    before_memory_ = memory + Shape::kBeforeAt + (group_ * 4 + warp) * Shape::kBeforeBytes;
  }

 protected:
  // Calls compute(work, number of the first tile) for each of the block's items that has rows for this consumer.
  template <int Chunk, class Compute>
  __device__ __forceinline__ void run_items(int items, Compute&& compute) {
    uint32_t tiles = 0, works = 0;
    if (group_ == 1) named_barrier_arrive(1, 2 * kWarpgroup);
    HopperWork work;
    for (int round = 0; work_at<D, Chunk>(a_, items, round, work); ++round) {
      if (work.count == 0) continue;
      barrier_wait(shared_.full_q(), works & 1);
      if (group_ * 64 < work.rows) {
        find_positions(work);
        compute(work, tiles);
      } else {
        skip(work, tiles);
      }
      tiles += work.count;
      works++;
    }
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // For a consumer without rows.
  __device__ __forceinline__ void skip(const HopperWork& work, uint32_t tiles) const {
    release(shared_.empty_q());
    for (uint32_t n = tiles; n < tiles + work.count; ++n) {
      barrier_wait(shared_.full_k(n), Shared::parity(n));
      release(shared_.empty_k(n));
      barrier_wait(shared_.full_v(n), Shared::parity(n));
      release(shared_.empty_v(n));
    }
  }

  __device__ __forceinline__ void find_positions(const HopperWork& work) {
    const int row = first_row_ + lane_ / 4;
    position_[0] = row_at(a_, work.item, work.kv_head, row).position;
    position_[1] = row_at(a_, work.item, work.kv_head, row + 8).position;
    warp_position_ = row_at(a_, work.item, work.kv_head, first_row_).position;
  }

  // score [64, kTile] = q k^T
  __device__ __forceinline__ void begin_scores(float (&score)[kScores], uint32_t n) const {
    const uint64_t q = matrix_descriptor(shared_.q() + group_ * 64 * 128), k = matrix_descriptor(shared_.k(n));
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int at = (step / 4 * Shape::kHalf + step % 4 * 32) / 16;
      wgmma_onto<Shape::kTile>(score, q + at, k + at, step != 0);
    }
    wgmma_commit();
  }

  // sums [64, D] = p v of `Count` keys of a tile from Step * 16 on, 16 at a time; plus sums if `add`.
  template <int Step, int Count>
  __device__ __forceinline__ void begin_sums(float (&sums)[D / 2], const uint32_t (&p)[kScores / 2], uint64_t v,
                                             int add) const {
    wgmma_transposed<D, Step>(sums, p, v + Step * 2048 / 16, add);
    if constexpr (Count > 16) {
      begin_sums<Step + 1, Count - 16>(sums, p, v, 1);
    } else {
      wgmma_commit();
    }
  }
  __device__ __forceinline__ uint64_t v_descriptor(uint32_t n) const {
    return transposed_descriptor(shared_.v(n), Shape::kHalf);
  }

  __device__ __forceinline__ void mask(float (&score)[kScores], int first_key) const {
    if (first_key + Shape::kTile - 1 <= warp_position_) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int last = position_[i / 2 % 2] - first_key - lane_ % 4 * 2;
      if (i / 4 * 8 + i % 2 > last) score[i] = minus_infinity();
    }
  }

  // Keeps a following wait behind the computation of x, a sum of weights. The assembler would move the wait to the
  // front, and nothing would overlap; it leaves it behind a store. x is not negative, so the store does nothing.
  __device__ __forceinline__ void after(float x) const {
    asm volatile(
        "{\n"
        ".reg .pred negative;\n"
        "setp.lt.f32 negative, %0, 0f00000000;\n"
        "@negative st.shared.f32 [%1], %0;\n"
        "}" ::"f"(x),
        "r"(shared_.q())
        : "memory");
  }

  __device__ __forceinline__ static void pack_weights(const float (&score)[kScores], uint32_t (&p)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p[i] = pack(score[2 * i], score[2 * i + 1]);
  }

  // Adds a chunk's sums to those of the chunks before. `keep`: until the next chunk has ended, too.
  __device__ __forceinline__ void combine_sums(float (&sums)[D / 2], const ChunkFactors (&f)[2], bool first,
                                               bool keep) const {
    float4* before = reinterpret_cast<float4*>(before_memory_) + lane_;
    if (!first) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const float4 b = before[i * 32];
        sums[4 * i] = combined(b.x, sums[4 * i], f[0]);
        sums[4 * i + 1] = combined(b.y, sums[4 * i + 1], f[0]);
        sums[4 * i + 2] = combined(b.z, sums[4 * i + 2], f[1]);
        sums[4 * i + 3] = combined(b.w, sums[4 * i + 3], f[1]);
      }
    }
    if (!keep) return;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      before[i * 32] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }

  // Writes the results of an item.
  __device__ __forceinline__ void put(const HopperWork& work, const float (&sums)[D / 2], const RowTotal& rows) const {
    if (work.item.part >= 0) {
      put_part(work, sums, rows);
    } else {
      put_out(work, sums, rows);
    }
  }

  __device__ __forceinline__ void put_part(const HopperWork& work, const float (&sums)[D / 2],
                                           const RowTotal& rows) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const AttentionRow row = row_at(a_, work.item, work.kv_head, first_row_ + lane_ / 4 + 8 * r);
      if (!row.there) continue;
      float* part = part_of(a_, work.item, row);
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        put_pair(part + i * 8 + lane_ % 4 * 2, sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]);
      }
      if (lane_ % 4 == 0) put_pair(part + D, rows.maximum[r], rows.weights[r]);
    }
  }

  // Through shared memory, so that a warp writes whole rows.
  __device__ __forceinline__ void put_out(const HopperWork& work, const float (&sums)[D / 2],
                                          const RowTotal& rows) const {
    constexpr int kPitch = D * 2 + 16, kTogether = 32 / Shape::kPieces;
    static_assert(16 * kPitch <= Shape::kBeforeBytes);
    const float inverse[2] = {__fdiv_rn(1.0f, rows.weights[0]), __fdiv_rn(1.0f, rows.weights[1])};
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint8_t* to = before_memory_ + (lane_ / 4 + 8 * r) * kPitch + i * 16 + lane_ % 4 * 4;
        put_result(reinterpret_cast<Element*>(to), sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1], inverse[r]);
      }
    }
    __syncwarp();
    const AttentionRow own = row_at(a_, work.item, work.kv_head, first_row_ + lane_ % 16);
    const int32_t own_row = own.there ? own.token * a_.heads + own.head : -1;
#pragma unroll
    for (int i = 0; i < 16 / kTogether; ++i) {
      const int row = i * kTogether + lane_ / Shape::kPieces, piece = lane_ % Shape::kPieces;
      const int32_t at = __shfl_sync(~0u, own_row, row);
      const uint4 values = *reinterpret_cast<const uint4*>(before_memory_ + row * kPitch + piece * 16);
      if (at >= 0) *reinterpret_cast<uint4*>(a_.out + static_cast<int64_t>(at) * D + piece * 8) = values;
    }
    __syncwarp();
  }

  const AttentionArgs& a_;
  const HopperMaps& maps_;
  const Shared& shared_;
  const int group_, lane_;
  int first_row_;           // of the warp
  uint8_t* before_memory_;  // the warp's
  int position_[2], warp_position_;
};

}  // namespace refit::cuda
