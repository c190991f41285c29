// The consumer of WideKernel::kHopperExact. It computes what the other kernels compute, in the same order (mma and
// wgmma add 16 products alike): the softmax goes by halves of a tile, which are the other kernels' tiles, the sums of
// the second half follow when those of the first are scaled, and mma adds the rounded weights.
#pragma once
#include "cuda/attention/attention_hopper_consumer.cuh"

namespace refit::cuda {

// The running softmax of a thread's rows. weights: as mma sums them for four columns, two of each row.
struct RunningRows {
  float maximum[2], weights[4];

  __device__ __forceinline__ void clear() {
    maximum[0] = maximum[1] = minus_infinity();
    weights[0] = weights[1] = weights[2] = weights[3] = 0.0f;
  }
};

template <int D>
class ExactConsumer : Consumer<D> {
  using Base = Consumer<D>;
  using Base::a_;
  using Base::group_;
  using Base::kScores;
  using Base::maps_;
  using Base::shared_;
  using typename Base::Shape;
  using typename Base::Shared;
  static constexpr int kTilesPerChunk = kAttentionChunk / Shape::kTile;
  static constexpr int kHalf = Shape::kTile / 2, kHalfScores = kScores / 2, kHalfSteps = kHalf / 16;
  static_assert(kHalf == AttentionShape<D>::kTile);

 public:
  static constexpr int kChunk = kAttentionChunk;
  using Base::Base;

  __device__ __forceinline__ void run(int items) {
    this->template run_items<kChunk>(items, [&](const HopperWork& work, uint32_t tiles) { compute(work, tiles); });
  }

 private:
  // Turns the scores of half a tile into weights; sets the factors for the sums before.
  template <int Half>
  __device__ __forceinline__ void weigh(float (&score)[kScores], RunningRows& rows, float (&keep)[2]) const {
    constexpr int kFirst = Half * kHalfScores;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = minus_infinity(), base;
#pragma unroll
      for (int i = kFirst + 2 * r; i < kFirst + kHalfScores; i += 4) most = fmaxf(most, fmaxf(score[i], score[i + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      keep[r] = advance(rows.maximum[r], most, a_.scale, base);
#pragma unroll
      for (int i = kFirst + 2 * r; i < kFirst + kHalfScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) score[i + e] = weight_of(score[i + e], a_.scale, base);
      }
    }
  }

  // Adds the rounded weights of half a tile, as the other kernels do.
  template <int Half>
  __device__ __forceinline__ static void add_weights(RunningRows& rows, const uint32_t (&p)[kScores / 2],
                                                     const float (&keep)[2]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.weights[e] = __fmul_rn(rows.weights[e], keep[e / 2]);
#pragma unroll
    for (int step = Half * kHalfSteps; step < (Half + 1) * kHalfSteps; ++step) {
      mma(rows.weights, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], kElementOnes, kElementOnes);
    }
  }

  __device__ __forceinline__ static void scale_sums(float (&sums)[D / 2], const float (&keep)[2]) {
#pragma unroll
    for (int j = 0; j < D / 2; ++j) sums[j] = __fmul_rn(sums[j], keep[j / 2 % 2]);
  }

  // Adds the chunk's maxima and weights to those of the chunks before, and clears the chunk's.
  __device__ __forceinline__ static void end_chunk(RunningRows& rows, RowTotal& before, bool first,
                                                   ChunkFactors (&f)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first) {
        before.maximum[r] = rows.maximum[r];
        before.weights[r] = rows.weights[2 * r];
      } else {
        f[r] = combine(before.maximum[r], rows.maximum[r]);
        before.weights[r] = combined(before.weights[r], rows.weights[2 * r], f[r]);
      }
    }
    rows.clear();
  }

  __device__ __forceinline__ void compute(const HopperWork& work, uint32_t tiles) {
    float score[kScores], sums[D / 2], keep[2][2];  // keep: of both halves of a tile
    uint32_t p[kScores / 2];
    ChunkFactors f[2];
    RunningRows rows;
    RowTotal before;
    rows.clear();
    // The consumers issue their products in turn, so one computes while the other does its softmax.
    const bool turns = work.rows > 64;
    const auto finish_weights = [&] {
      this->pack_weights(score, p);
      add_weights<0>(rows, p, keep[0]);
      add_weights<1>(rows, p, keep[1]);
    };

    barrier_wait(shared_.full_k(tiles), Shared::parity(tiles));
    fence_async_proxy();
    wgmma_begin();
    this->begin_scores(score, tiles);
    wgmma_wait<0>();
    pin_registers(score);
    this->release(shared_.empty_k(tiles));
    this->mask(score, work.first * Shape::kTile);
    weigh<0>(score, rows, keep[0]);
    weigh<1>(score, rows, keep[1]);
    finish_weights();
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
      this->template begin_sums<0, kHalf>(sums, p, this->v_descriptor(n - 1), (i - 1) % kTilesPerChunk);
      if (turns) named_barrier_arrive(2 - group_, 2 * kWarpgroup);
      wgmma_wait<0>();
      pin_registers(score);
      pin_registers(sums);
      this->release(shared_.empty_k(n));
      scale_sums(sums, keep[1]);
      wgmma_begin();
      this->template begin_sums<kHalf / 16, kHalf>(sums, p, this->v_descriptor(n - 1), 1);
      const bool fresh = i % kTilesPerChunk == 0, first = i == kTilesPerChunk;
      if (fresh) end_chunk(rows, before, first, f);
      this->mask(score, (work.first + i) * Shape::kTile);
      weigh<0>(score, rows, keep[0]);
      weigh<1>(score, rows, keep[1]);
      // The products take about until here.
      this->after(score[kScores - 1]);
      wgmma_wait<0>();
      pin_registers(sums);
      this->release(shared_.empty_v(n - 1));
      if (fresh) {
        this->combine_sums(sums, f, first, true);
      } else {
        scale_sums(sums, keep[0]);
      }
      finish_weights();
    }
    this->release(shared_.empty_q());

    const uint32_t n = tiles + work.count - 1;
    const bool first = work.count <= kTilesPerChunk;
    barrier_wait(shared_.full_v(n), Shared::parity(n));
    fence_async_proxy();
    wgmma_begin();
    this->template begin_sums<0, kHalf>(sums, p, this->v_descriptor(n), (work.count - 1) % kTilesPerChunk);
    wgmma_wait<0>();
    pin_registers(sums);
    scale_sums(sums, keep[1]);
    wgmma_begin();
    this->template begin_sums<kHalf / 16, kHalf>(sums, p, this->v_descriptor(n), 1);
    end_chunk(rows, before, first, f);
    wgmma_wait<0>();
    pin_registers(sums);
    this->release(shared_.empty_v(n));
    this->combine_sums(sums, f, first, false);
    this->put(work, sums, before);
  }
};

}  // namespace refit::cuda
