// Attention by wgmma (Shah et al., FlashAttention-3, 2024): one warpgroup loads, two compute 64 rows each. A consumer
// computes the scores of a tile while its products with the tile before run, and does its softmax while the other
// consumer's products run.
#include <algorithm>
#include <atomic>
#include <numeric>

#include "cuda/attention/attention_hopper.h"
#include "cuda/attention/attention_hopper_exact.cuh"
#include "cuda/attention/attention_hopper_fast.cuh"
#include "cuda/attention/attention_launch.h"
#include "cuda/device/current_gpu.h"
#include "cuda/device/driver.h"

namespace refit::cuda {
namespace {

template <int D, template <int> class Consumer>
__global__ void __launch_bounds__(kHopperThreads, 1)
    attention_hopper_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ HopperMaps maps,
                            int items) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const HopperShared<D> shared{shared_address(memory)};
  if (threadIdx.x == 0) {
    shared.init();
    barriers_initialised();
    if (maps.box_rows != 0) {
      prefetch_map(maps.k);
      prefetch_map(maps.v);
    }
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<40>();
    Producer<D, Consumer<D>::kChunk>(a, maps, shared).run(items);
  } else {
    take_registers<232>();
    Consumer<D>(a, maps, shared, memory).run(items);
  }
}

CUtensorMap map_of(const Element* cache, int64_t rows, int head_dim, int box_rows) {
  CUtensorMap map;
  const auto halves = static_cast<cuuint64_t>(head_dim / 64);
  const cuuint64_t sizes[] = {64, halves, static_cast<cuuint64_t>(rows)}, strides[] = {128, 128 * halves};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1, 1};
  check(driver().encode_tiled(&map, kMapElement, 3, const_cast<Element*>(cache), sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "attention: the map of the KV cache");
  return map;
}

template <int D, template <int> class Consumer>
void launch(const AttentionArgs& a, int items, int pages, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = HopperShape<D>::kBytes;
  constexpr auto kKernel = attention_hopper_kernel<D, Consumer>;
  allow_shared(kKernel, kBytes, 100, done);
  const int blocks = static_cast<int>(std::min<int64_t>(multiprocessors(), static_cast<int64_t>(items) * a.kv_heads));

  // A box is within a page, and begins at a multiple of 8 rows, because the swizzle has this period. With 32 rows a
  // tile has at least one box for each of the producer's warps.
  HopperMaps maps{};
  maps.box_rows = std::gcd(a.page_size, 32);
  if (maps.box_rows >= 8) {
    const int64_t rows = static_cast<int64_t>(pages) * a.kv_heads * a.page_size;
    maps.k = map_of(a.k, rows, D, maps.box_rows);
    maps.v = map_of(a.v, rows, D, maps.box_rows);
  } else {
    maps.box_rows = 0;
  }
  kKernel<<<blocks, kHopperThreads, kBytes, stream>>>(a, maps, items);
  check_launch("attention_hopper");
}

}  // namespace

void attention_wide_hopper(const AttentionArgs& a, int items, int pages, bool exact, cudaStream_t stream) {
  if (a.head_dim == 64) {
    (exact ? launch<64, ExactConsumer> : launch<64, FastConsumer>)(a, items, pages, stream);
  } else {
    (exact ? launch<128, ExactConsumer> : launch<128, FastConsumer>)(a, items, pages, stream);
  }
}

}  // namespace refit::cuda
