// Combines the partial results of some tokens' chunks in ascending order, like the kernels that compute all chunks.
#pragma once
#include "cuda/attention/attention_tile.cuh"

namespace refit::cuda {

// Chunks whose loads are in flight together; they are still combined in order.
constexpr int kMergeAhead = 16;

// blockIdx.x: the merge, blockIdx.y: the query head; the blocks along z divide tokens and columns.
__global__ void __launch_bounds__(kAttentionThreads)
    attention_merge_kernel(const __grid_constant__ AttentionArgs a, const AttentionMerge* merges) {
  let_next_kernel_begin();
  const AttentionMerge merge = merges[blockIdx.x];
  const int head = blockIdx.y, pairs = a.head_dim / 2;
  const int64_t pitch = static_cast<int64_t>(a.heads) * (a.head_dim + 2), stride = merge.tokens * pitch;
  for (int i = blockIdx.z * kAttentionThreads + threadIdx.x; i < merge.tokens * pairs;
       i += gridDim.z * kAttentionThreads) {
    const int token = i / pairs, column = i % pairs * 2;
    const float* part = a.parts + (merge.part + token) * pitch + static_cast<int64_t>(head) * (a.head_dim + 2);
    float2 sums = *reinterpret_cast<const float2*>(part + column);
    float2 tail = *reinterpret_cast<const float2*>(part + a.head_dim);  // maximum, sum of weights
    for (int chunk = 1; chunk < merge.parts; chunk += kMergeAhead) {
      float2 next_sums[kMergeAhead], next_tail[kMergeAhead];
#pragma unroll
      for (int j = 0; j < kMergeAhead; ++j) {
        if (chunk + j >= merge.parts) continue;
        const float* next = part + (chunk + j) * stride;
        next_sums[j] = *reinterpret_cast<const float2*>(next + column);
        next_tail[j] = *reinterpret_cast<const float2*>(next + a.head_dim);
      }
#pragma unroll
      for (int j = 0; j < kMergeAhead; ++j) {
        if (chunk + j >= merge.parts) continue;
        const ChunkFactors f = combine(tail.x, next_tail[j].x);
        tail.y = combined(tail.y, next_tail[j].y, f);
        sums.x = combined(sums.x, next_sums[j].x, f);
        sums.y = combined(sums.y, next_sums[j].y, f);
      }
    }
    Element* out = a.out + (static_cast<int64_t>(merge.first_token + token) * a.heads + head) * a.head_dim;
    put_result(out + column, sums.x, sums.y, __fdiv_rn(1.0f, tail.y));
  }
}

}  // namespace refit::cuda
