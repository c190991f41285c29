// Up to 64 rows of one KV head: four warps of 16 rows, each against all keys. For prefill (AttentionItem) and for keys
// that decoding sequences share (AttentionPrefix).
#pragma once
#include <type_traits>

#include "cuda/attention/attention_prefix.cuh"
#include "cuda/attention/attention_tile.cuh"

namespace refit::cuda {

__device__ __forceinline__ int rows_of(const AttentionArgs& a, const AttentionItem& item) {
  return item.tokens * a.group;
}
__device__ __forceinline__ int rows_of(const AttentionArgs& a, const AttentionPrefix& prefix) {
  return prefix.members * a.group;
}

// Writes the sums of row r, which is 0 or 1, of a thread's two.
template <int D>
__device__ __forceinline__ void put_part(const AttentionArgs& a, float* part, const float (&sums)[D / 8][4], int r,
                                         float maximum, float weights) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const int column = n * 8 + t * 2;
    if (column < a.head_dim) put_pair(part + column, sums[n][2 * r], sums[n][2 * r + 1]);
  }
  if (t == 0) put_pair(part + a.head_dim, maximum, weights);
}

// Shared memory of a prefix. Its sums over the chunks before are behind the tiles.
template <int D>
constexpr int kPrefixBytes = AttentionShape<D>::kStreamBytes + D / 8 * kAttentionThreads * 16;

template <int D, class Item>
__global__ void __launch_bounds__(kAttentionThreads, D <= 128 ? 2 : 1)
    attention_wide_kernel(const __grid_constant__ AttentionArgs a, const Item* items) {
  using Shape = AttentionShape<D>;
  constexpr bool kPrefix = std::is_same_v<Item, AttentionPrefix>;
  constexpr int kColumns = Shape::kTile / 8;  // in matrices of 8
  constexpr int kOut = D / 8;
  extern __shared__ __align__(16) uint8_t shared[];

  if constexpr (kPrefix) let_next_kernel_begin();
  const Item item = items[blockIdx.x / a.kv_heads];
  const int kv_head = blockIdx.x % a.kv_heads, rows = rows_of(a, item);
  if (rows <= (kPrefix ? 0 : kNarrowRows)) {  // padding, or the narrow kernel's
    wait_for_kernel_before();
    return;
  }
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
  const bool idle = first_row >= rows;

  KvStream<D> stream(a, tiles_of<D>(item), kv_head, shared);
  const AttentionRow row[2] = {row_at(a, item, kv_head, first_row + g), row_at(a, item, kv_head, first_row + g + 8)};
  const int warp_first = row_at(a, item, kv_head, first_row).position;
  const int warp_last = row_at(a, item, kv_head, first_row + 15).position;
  uint32_t q[D / 16][4];
  load_q<D>(a, row, q);

  const uint32_t k_lane = (lane / 16 * 8 + lane % 8) * Shape::kPitch + lane / 8 % 2 * 16;
  const uint32_t v_lane = (lane / 8 % 2 * 8 + lane % 8) * Shape::kPitch + lane / 16 * 16;

  float sums[kOut][4], weights[4], maximum[2];
  const auto clear = [&] {
#pragma unroll
    for (int n = 0; n < kOut; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    weights[0] = weights[1] = weights[2] = weights[3] = 0.0f;
    maximum[0] = maximum[1] = minus_infinity();
  };
  clear();

  // Sums over the chunks before this one. They are used once per chunk, and registers are scarce. An index that is
  // unknown to the compiler keeps them in local memory, which L1 caches. But L1 writes through, and a prefix needs the
  // bandwidth for its keys.
  float4 local[kPrefix ? 1 : kOut];
  float before_maximum[2], before_weights[2];
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  constexpr int kStride = kPrefix ? kAttentionThreads : 1;
  float4* const before = kPrefix ? reinterpret_cast<float4*>(shared + Shape::kStreamBytes) + threadIdx.x : local + zero;

  for (int i = 0; i < stream.count; ++i) {
    stream.begin(i);
    const int first_key = stream.first_key(i);
    if (!idle && first_key <= warp_last) {
      float score[kColumns][4];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
      const uint32_t k = stream.k(i) + k_lane;
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
          uint32_t b[4];
          load_matrices(b, k + n * 8 * Shape::kPitch + step * 32);
          mma(score[n], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
          mma(score[n + 1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
        }
      }
      if (first_key + Shape::kTile - 1 > warp_first) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (first_key + n * 8 + t * 2 + e % 2 > row[e / 2].position) score[n][e] = minus_infinity();
          }
        }
      }

      uint32_t p[kColumns][2];
      float keep[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = minus_infinity();
#pragma unroll
        for (int n = 0; n < kColumns; ++n) most = fmaxf(most, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float base;
        keep[r] = advance(maximum[r], most, a.scale, base);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          p[n][r] = pack(weight_of(score[n][2 * r], a.scale, base), weight_of(score[n][2 * r + 1], a.scale, base));
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = __fmul_rn(weights[e], keep[e / 2]);
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = __fmul_rn(sums[n][e], keep[e / 2]);
      }
      const uint32_t v = stream.v(i) + v_lane;
#pragma unroll
      for (int step = 0; step < Shape::kTile / 16; ++step) {
        const uint32_t(&low)[2] = p[2 * step];
        const uint32_t(&high)[2] = p[2 * step + 1];
        mma(weights, low[0], low[1], high[0], high[1], kElementOnes, kElementOnes);
#pragma unroll
        for (int n = 0; n < kOut; n += 2) {
          uint32_t b[4];
          load_matrices_transposed(b, v + step * 16 * Shape::kPitch + n * 16);
          mma(sums[n], low[0], low[1], high[0], high[1], b[0], b[1]);
          mma(sums[n + 1], low[0], low[1], high[0], high[1], b[2], b[3]);
        }
      }
    }
    stream.finish(i);

    const bool last = i + 1 == stream.count, ends_chunk = (i + 1) % Shape::kTilesPerChunk == 0;
    if (!last && !ends_chunk) continue;
    if constexpr (kPrefix) {
      if (!ends_chunk) break;  // The chunk continues with the members' own keys.
    } else {
      if (item.part >= 0) break;
    }
    if (i >= Shape::kTilesPerChunk) {
      ChunkFactors f[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = maximum[r];
        maximum[r] = before_maximum[r];
        f[r] = combine(maximum[r], next);
        weights[2 * r] = combined(before_weights[r], weights[2 * r], f[r]);
      }
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        const float4 b = before[n * kStride];
        sums[n][0] = combined(b.x, sums[n][0], f[0]);
        sums[n][1] = combined(b.y, sums[n][1], f[0]);
        sums[n][2] = combined(b.z, sums[n][2], f[1]);
        sums[n][3] = combined(b.w, sums[n][3], f[1]);
      }
    }
    if (last) break;
#pragma unroll
    for (int n = 0; n < kOut; ++n) before[n * kStride] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      before_maximum[r] = maximum[r];
      before_weights[r] = weights[2 * r];
    }
    clear();
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!row[r].there) continue;
    if constexpr (kPrefix) {
      const int at = first_row + g + 8 * r;
      const bool begun = stream.count > Shape::kTilesPerChunk && stream.count % Shape::kTilesPerChunk != 0;
      put_part<D>(a, part_of(a, item, at, row[r].head, begun ? 1 : 0), sums, r, maximum[r], weights[2 * r]);
      if (!begun) continue;
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        const float4 b = before[n * kStride];
        sums[n][2 * r] = r == 0 ? b.x : b.z;
        sums[n][2 * r + 1] = r == 0 ? b.y : b.w;
      }
      put_part<D>(a, part_of(a, item, at, row[r].head, 0), sums, r, before_maximum[r], before_weights[r]);
    } else if (item.part >= 0) {
      put_part<D>(a, part_of(a, item, row[r]), sums, r, maximum[r], weights[2 * r]);
    } else {
      Element* out = out_of(a, row[r]);
      const float inverse = __fdiv_rn(1.0f, weights[2 * r]);
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        const int column = n * 8 + t * 2;
        if (column < a.head_dim) put_result(out + column, sums[n][2 * r], sums[n][2 * r + 1], inverse);
      }
    }
  }
}

}  // namespace refit::cuda
