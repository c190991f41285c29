// Up to 16 rows of one KV head: four warps divide the keys of a tile for the scores, and the columns of V for the sums.
// For decode, where keys must stream and rows are few.
#pragma once
#include "cuda/attention/attention_prefix.cuh"
#include "cuda/attention/attention_tile.cuh"

namespace refit::cuda {

template <int D>
struct NarrowShape : AttentionShape<D> {
  static constexpr int kColumns = AttentionShape<D>::kTile / 8 / kAttentionWarps;  // of scores, per warp
  static constexpr int kOut = (D / 8 + kAttentionWarps - 1) / kAttentionWarps;     // of sums, per warp
  static constexpr int kWeightPitch = AttentionShape<D>::kTile * 2 + 16;           // bytes; odd in units of 16
  static constexpr int kWeightsAt = AttentionShape<D>::kStreamBytes;               // [16] rows of Elements
  static constexpr int kMaximaAt = kWeightsAt + kNarrowRows * kWeightPitch;        // [warps][16] floats
  static constexpr int kBytes = kMaximaAt + kAttentionWarps * kNarrowRows * 4;
  static_assert(kColumns == 1 || kColumns == 2);
};

// The scores of a warp's columns. A row's products are added in the same order as in the wide kernel.
template <int D>
__device__ __forceinline__ void narrow_scores(const uint32_t (&q)[D / 16][4], uint32_t k,
                                              float (&score)[NarrowShape<D>::kColumns][4]) {
  using Shape = NarrowShape<D>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Shape::kColumns; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
  if constexpr (Shape::kColumns == 2) {
    k += (lane / 16 * 8 + lane % 8) * Shape::kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t b[4];
      load_matrices(b, k + step * 32);
      mma(score[0], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
      mma(score[1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
    }
  } else {
    k += lane % 8 * Shape::kPitch + lane / 8 * 16;
#pragma unroll
    for (int step = 0; step < D / 16; step += 2) {
      uint32_t b[4];
      load_matrices(b, k + step * 32);
      mma(score[0], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
      mma(score[0], q[step + 1][0], q[step + 1][1], q[step + 1][2], q[step + 1][3], b[2], b[3]);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kAttentionThreads, D <= 96 ? 4 : 3)
    attention_narrow_kernel(const __grid_constant__ AttentionArgs a) {
  using Shape = NarrowShape<D>;
  extern __shared__ __align__(16) uint8_t shared[];

  const AttentionItem item = a.items[blockIdx.x / a.kv_heads];
  const int kv_head = blockIdx.x % a.kv_heads;
  if (item.tokens == 0 || item.tokens * a.group > kNarrowRows) {  // padding, or the wide kernel's
    wait_for_kernel_before();
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

  KvStream<D> stream(a, tiles_of<D>(item), kv_head, shared);
  // Not before: o's weights would delay the rest of RoPE and the keys.
  let_next_kernel_begin();
  const AttentionRow row[2] = {row_at(a, item, kv_head, g), row_at(a, item, kv_head, g + 8)};
  uint32_t q[D / 16][4];
  load_q<D>(a, row, q);

  uint8_t* weight_rows = shared + Shape::kWeightsAt;
  float* maxima = reinterpret_cast<float*>(shared + Shape::kMaximaAt);
  const uint32_t p_lane =
      shared_address(weight_rows) + (lane / 8 % 2 * 8 + lane % 8) * Shape::kWeightPitch + lane / 16 * 16;
  const int first_out = warp * Shape::kOut;  // in matrices of 8 columns
  const uint32_t v_lane = lane * Shape::kPitch + first_out * 16;
  const bool sums_here = first_out * 8 < D;

  float sums[Shape::kOut][4], weights[4], maximum[2];
  float before[Shape::kOut][4], before_weights[2], before_maximum[2];
  const auto clear = [&] {
#pragma unroll
    for (int n = 0; n < Shape::kOut; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    weights[0] = weights[1] = weights[2] = weights[3] = 0.0f;
    maximum[0] = maximum[1] = minus_infinity();
  };
  clear();

  const int first_column = first_out * 8 + t * 2;
  if (item.states > 0) {
    combine_states<Shape::kOut>(a, item, row, first_column).put(before, before_maximum, before_weights);
  }
  if (item.skip > 0) {
    PartColumns<Shape::kOut> begun;
    begun.get(a, row, item.state + item.states, first_column);
    float sum[2];
    begun.put(sums, maximum, sum);
    weights[0] = weights[1] = sum[0];
    weights[2] = weights[3] = sum[1];
  }

  for (int i = item.skip / Shape::kTile; i < stream.count; ++i) {
    stream.begin(i);
    const int warp_key = warp * Shape::kColumns * 8, first_key = stream.first_key(i);
    float score[Shape::kColumns][4];
    narrow_scores<D>(q, stream.k(i) + warp_key * Shape::kPitch, score);
    if (first_key + Shape::kTile - 1 > item.position) {
#pragma unroll
      for (int n = 0; n < Shape::kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (first_key + warp_key + n * 8 + t * 2 + e % 2 > row[e / 2].position) score[n][e] = minus_infinity();
        }
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = minus_infinity();
#pragma unroll
      for (int n = 0; n < Shape::kColumns; ++n) most = fmaxf(most, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (t == 0) maxima[warp * kNarrowRows + g + 8 * r] = most;
    }
    __syncthreads();
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = minus_infinity();
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w) most = fmaxf(most, maxima[w * kNarrowRows + g + 8 * r]);
      float base;
      keep[r] = advance(maximum[r], most, a.scale, base);
#pragma unroll
      for (int n = 0; n < Shape::kColumns; ++n) {
        uint8_t* to = weight_rows + (g + 8 * r) * Shape::kWeightPitch + (warp_key + n * 8 + t * 2) * 2;
        *reinterpret_cast<uint32_t*>(to) =
            pack(weight_of(score[n][2 * r], a.scale, base), weight_of(score[n][2 * r + 1], a.scale, base));
      }
    }
    __syncthreads();
    if (sums_here) {
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = __fmul_rn(weights[e], keep[e / 2]);
#pragma unroll
      for (int n = 0; n < Shape::kOut; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = __fmul_rn(sums[n][e], keep[e / 2]);
      }
#pragma unroll
      for (int step = 0; step < Shape::kTile / 16; step += 2) {
        uint32_t p[2][4];
        load_matrices(p[0], p_lane + step * 32);
        load_matrices(p[1], p_lane + step * 32 + 32);
        mma(weights, p[0][0], p[0][1], p[0][2], p[0][3], kElementOnes, kElementOnes);
        mma(weights, p[1][0], p[1][1], p[1][2], p[1][3], kElementOnes, kElementOnes);
#pragma unroll
        for (int n = 0; n < Shape::kOut; ++n) {
          uint32_t b[4];
          load_matrices_transposed(b, stream.v(i) + v_lane + step * 16 * Shape::kPitch + n * 16);
          mma(sums[n], p[0][0], p[0][1], p[0][2], p[0][3], b[0], b[1]);
          mma(sums[n], p[1][0], p[1][1], p[1][2], p[1][3], b[2], b[3]);
        }
      }
    }
    stream.finish(i);

    const bool last = i + 1 == stream.count;
    if (!last && (i + 1) % Shape::kTilesPerChunk != 0) continue;
    if (item.part >= 0) break;
    if (i >= Shape::kTilesPerChunk || item.states > 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = maximum[r];
        maximum[r] = before_maximum[r];
        const ChunkFactors f = combine(maximum[r], next);
        weights[2 * r] = combined(before_weights[r], weights[2 * r], f);
#pragma unroll
        for (int n = 0; n < Shape::kOut; ++n) {
          sums[n][2 * r] = combined(before[n][2 * r], sums[n][2 * r], f);
          sums[n][2 * r + 1] = combined(before[n][2 * r + 1], sums[n][2 * r + 1], f);
        }
      }
    }
    if (last) break;
#pragma unroll
    for (int n = 0; n < Shape::kOut; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) before[n][e] = sums[n][e];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      before_maximum[r] = maximum[r];
      before_weights[r] = weights[2 * r];
    }
    clear();
  }

  if (!sums_here) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!row[r].there) continue;
    float* part = item.part >= 0 ? part_of(a, item, row[r]) : nullptr;
    Element* out = out_of(a, row[r]);
    const float inverse = __fdiv_rn(1.0f, weights[2 * r]);
#pragma unroll
    for (int n = 0; n < Shape::kOut; ++n) {
      const int column = first_column + n * 8;
      if (column >= a.head_dim) continue;
      if (part != nullptr) {
        put_pair(part + column, sums[n][2 * r], sums[n][2 * r + 1]);
      } else {
        put_result(out + column, sums[n][2 * r], sums[n][2 * r + 1], inverse);
      }
    }
    if (part != nullptr && warp == 0 && t == 0) put_pair(part + a.head_dim, maximum[r], weights[2 * r]);
  }
}

}  // namespace refit::cuda
