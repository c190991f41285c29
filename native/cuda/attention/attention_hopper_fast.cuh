// The consumer of WideKernel::kHopper: a tile of 128 keys at a time. It adds the weights before they are rounded to
// Element.
#pragma once
#include "cuda/attention/attention_hopper_consumer.cuh"

namespace refit::cuda {

template <int D>
class FastConsumer : Consumer<D> {
  using Base = Consumer<D>;
  using Base::a_;
  using Base::group_;
  using Base::kScores;
  using Base::maps_;
  using Base::shared_;
  using typename Base::Shape;
  using typename Base::Shared;
  static constexpr int kTilesPerChunk = kHopperChunk / Shape::kTile;

 public:
  static constexpr int kChunk = kHopperChunk;
  using Base::Base;

  __device__ __forceinline__ void run(int items) {
    this->template run_items<kChunk>(items, [&](const HopperWork& work, uint32_t tiles) { compute(work, tiles); });
  }

 private:
  __device__ __forceinline__ static void clear(RowTotal& rows) {
    rows.maximum[0] = rows.maximum[1] = minus_infinity();
    rows.weights[0] = rows.weights[1] = 0.0f;
  }

  // Masks the scores of a tile and finds the rows' maxima. Sets the factors for the old sums, and what is subtracted.
  __device__ __forceinline__ void find_maxima(float (&score)[kScores], RowTotal& rows, float (&keep)[2],
                                              float (&base)[2], int first_key) const {
    this->mask(score, first_key);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = minus_infinity();
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) most = fmaxf(most, fmaxf(score[i], score[i + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      keep[r] = advance(rows.maximum[r], most, a_.scale, base[r]);
    }
  }

  // Turns the scores of row r into weights.
  __device__ __forceinline__ void weigh(float (&score)[kScores], RowTotal& rows, const float (&keep)[2],
                                        const float (&base)[2], int r) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        score[i + e] = weight_of(score[i + e], a_.scale, base[r]);
        sum[e] = __fadd_rn(sum[e], score[i + e]);
      }
    }
    rows.weights[r] = __fmaf_rn(rows.weights[r], keep[r], __fadd_rn(sum[0], sum[1]));
  }

  // Adds the chunk's maxima and weights to those of the chunks before, and clears the chunk's.
  __device__ __forceinline__ void end_chunk(RowTotal& rows, RowTotal& before, bool first, ChunkFactors (&f)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.weights[r];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      if (first) {
        before.maximum[r] = rows.maximum[r];
        before.weights[r] = sum;
      } else {
        f[r] = combine(before.maximum[r], rows.maximum[r]);
        before.weights[r] = combined(before.weights[r], sum, f[r]);
      }
    }
    clear(rows);
  }

  __device__ __forceinline__ void compute(const HopperWork& work, uint32_t tiles) {
    float score[kScores], sums[D / 2], keep[2], base[2];
    uint32_t p[kScores / 2];
    ChunkFactors f[2];
    RowTotal rows, before;
    clear(rows);
    // The consumers issue their products in turn, so one computes while the other does its softmax.
    const bool turns = work.rows > 64;

    barrier_wait(shared_.full_k(tiles), Shared::parity(tiles));
    fence_async_proxy();
    wgmma_begin();
    this->begin_scores(score, tiles);
    wgmma_wait<0>();
    pin_registers(score);
    this->release(shared_.empty_k(tiles));
    find_maxima(score, rows, keep, base, work.first * Shape::kTile);
    weigh(score, rows, keep, base, 0);
    weigh(score, rows, keep, base, 1);
    this->pack_weights(score, p);
    for (int i = 1; i < work.count; ++i) {
      const uint32_t n = tiles + i;
      barrier_wait(shared_.full_k(n), Shared::parity(n));
      if (!by_boxes<D>(maps_, work, i)) fence_async_proxy();
      if (turns) named_barrier(1 + group_, 2 * kWarpgroup);
      wgmma_begin();
      this->begin_scores(score, n);
      barrier_wait(shared_.full_v(n - 1), Shared::parity(n - 1));
      if (!by_boxes<D>(maps_, work, i - 1)) fence_async_proxy();
      wgmma_begin();
      this->template begin_sums<0, Shape::kTile>(sums, p, this->v_descriptor(n - 1), (i - 1) % kTilesPerChunk);
      if (turns) named_barrier_arrive(2 - group_, 2 * kWarpgroup);
      wgmma_wait<1>();
      pin_registers(score);
      this->release(shared_.empty_k(n));
      const bool fresh = i % kTilesPerChunk == 0, first = i == kTilesPerChunk;
      if (fresh) end_chunk(rows, before, first, f);
      find_maxima(score, rows, keep, base, (work.first + i) * Shape::kTile);
      weigh(score, rows, keep, base, 0);
      // The products take about until here. V is released early: the tile after the next one needs its place.
      this->after(rows.weights[0]);
      wgmma_wait<0>();
      pin_registers(sums);
      this->release(shared_.empty_v(n - 1));
      weigh(score, rows, keep, base, 1);
      if (fresh) {
        this->combine_sums(sums, f, first, true);
      } else {
#pragma unroll
        for (int j = 0; j < D / 2; ++j) sums[j] = __fmul_rn(sums[j], keep[j / 2 % 2]);
      }
      this->pack_weights(score, p);
    }
    this->release(shared_.empty_q());

    const uint32_t n = tiles + work.count - 1;
    const bool first = work.count <= kTilesPerChunk;
    barrier_wait(shared_.full_v(n), Shared::parity(n));
    fence_async_proxy();
    wgmma_begin();
    this->template begin_sums<0, Shape::kTile>(sums, p, this->v_descriptor(n), (work.count - 1) % kTilesPerChunk);
    end_chunk(rows, before, first, f);
    wgmma_wait<0>();
    pin_registers(sums);
    this->release(shared_.empty_v(n));
    this->combine_sums(sums, f, first, false);
    this->put(work, sums, before);
  }
};

}  // namespace refit::cuda
