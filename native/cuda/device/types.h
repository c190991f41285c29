// Types that all kernel launchers of native/cuda share: the element, KV view, and the mark that records where a GPU
// was when it failed.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device/element.h"

namespace refit::cuda {

// Largest number of tensor-parallel ranks of one engine.
constexpr int kMaxRanks = 8;

// Keys and values of one layer on one rank. Element (page, head, slot, d) of either is at
// ((page * kv_heads + head) * page_size + slot) * head_dim + d.
struct KvLayer {
  Element* k = nullptr;
  Element* v = nullptr;
  int pages = 0, page_size = 0, kv_heads = 0, head_dim = 0;
};

}  // namespace refit::cuda
