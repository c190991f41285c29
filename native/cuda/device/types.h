// Types that all kernel launchers of native/cuda share: element type, KV view, and the mark that records where a GPU
// was when it failed.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::cuda {

using bf16 = __nv_bfloat16;

// Largest number of tensor-parallel ranks of one engine.
constexpr int kMaxRanks = 8;

// Keys and values of one layer on one rank. Element (page, head, slot, d) of either is at
// ((page * kv_heads + head) * page_size + slot) * head_dim + d.
struct KvLayer {
  bf16* k = nullptr;
  bf16* v = nullptr;
  int pages = 0, page_size = 0, kv_heads = 0, head_dim = 0;
};

}  // namespace refit::cuda
