// The wide kernels for compute capability 9.0: up to kHopperRows rows of one KV head, head_dim 64 or 128.
#pragma once
#include "cuda/attention/attention_tile.cuh"

namespace refit::cuda {

// Computes the first `items` of a.items, except those of at most kNarrowRows rows. The cache has `pages` pages. Buffers
// are aligned to 16 bytes, and ldq is a multiple of head_dim. exact: WideKernel::kHopperExact.
void attention_wide_hopper(const AttentionArgs& a, int items, int pages, bool exact, cudaStream_t stream);

}  // namespace refit::cuda
