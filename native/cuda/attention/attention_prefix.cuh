// A prefix: the rows of its members in the wide kernel, and how the narrow kernel continues from its results.
#pragma once
#include "cuda/attention/attention_tile.cuh"

namespace refit::cuda {

// Row r of a prefix: a member and a query head of the KV head's group. Its token sees all keys of the prefix.
__device__ __forceinline__ AttentionRow row_at(const AttentionArgs& a, const AttentionPrefix& prefix, int kv_head,
                                               int r) {
  const bool there = r < prefix.members * a.group;
  if (!there) r = prefix.members * a.group - 1;
  const int member = r / a.group;
  return {a.members[prefix.first_member + member].token, kv_head * a.group + (r - member * a.group), prefix.keys,
          there};
}

// The part that row r of a prefix writes, or the one behind it.
__device__ __forceinline__ float* part_of(const AttentionArgs& a, const AttentionPrefix& prefix, int r, int head,
                                          int behind) {
  return part_at(a, a.members[prefix.first_member + r / a.group].part + prefix.row + behind, head);
}

// Two rows' partial results: the columns that a thread of the narrow kernel has in kOut matrices of 8 columns.
template <int kOut>
struct PartColumns {
  float2 sums[2][kOut];
  float2 tail[2];  // maximum, sum of weights

  __device__ __forceinline__ void get(const AttentionArgs& a, const AttentionRow (&row)[2], int part, int column) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* from = part_at(a, part, row[r].head);
      tail[r] = *reinterpret_cast<const float2*>(from + a.head_dim);
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        const bool there = column + n * 8 < a.head_dim;
        sums[r][n] = there ? *reinterpret_cast<const float2*>(from + column + n * 8) : make_float2(0.0f, 0.0f);
      }
    }
  }

  // Combines them with those of the next chunk.
  __device__ __forceinline__ void add(const PartColumns& next) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const ChunkFactors f = combine(tail[r].x, next.tail[r].x);
      tail[r].y = combined(tail[r].y, next.tail[r].y, f);
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        sums[r][n].x = combined(sums[r][n].x, next.sums[r][n].x, f);
        sums[r][n].y = combined(sums[r][n].y, next.sums[r][n].y, f);
      }
    }
  }

  __device__ __forceinline__ void put(float (&sum)[kOut][4], float (&maximum)[2], float (&weights)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = tail[r].x;
      weights[r] = tail[r].y;
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        sum[n][2 * r] = sums[r][n].x;
        sum[n][2 * r + 1] = sums[r][n].y;
      }
    }
  }
};

// Combines an item's `states`, several loads in flight together.
template <int kOut>
__device__ __forceinline__ PartColumns<kOut> combine_states(const AttentionArgs& a, const AttentionItem& item,
                                                            const AttentionRow (&row)[2], int column) {
  constexpr int kAhead = kOut <= 4 ? 2 : 1;
  PartColumns<kOut> all;
  all.get(a, row, item.state, column);
  for (int s = 1; s < item.states; s += kAhead) {
    PartColumns<kOut> next[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (s + j < item.states) next[j].get(a, row, item.state + s + j, column);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (s + j < item.states) all.add(next[j]);
    }
  }
  return all;
}

}  // namespace refit::cuda
