#include <algorithm>

#include "cuda/device/check.h"
#include "cuda/scatter/scatter_bulk.cuh"
#include "cuda/scatter/scatter_kernel.h"
#include "cuda/scatter/scatter_tile.cuh"

namespace refit::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kScatterThreads = 512;
// Threads in addition to the warp that copies in bulk.
constexpr int kThreadsBeside = 256;

// All warps of a group copy; before it copies, the first one looks for the next tile.
template <int kGroup, typename Sync>
__device__ __forceinline__ void run_threads(const ScatterTiles& list, uint32_t thread, ScatterJob (&jobs)[2],
                                            TransposeTile& tile, Sync sync) {
  TileFeed feed(list);
  if (thread < 32) {
    feed.ask();
    feed.next(jobs[0]);
  }
  for (uint32_t turn = 0;; turn ^= 1) {
    // One barrier per tile: after it the job is ready, and no thread reads the previous one any more.
    sync();
    const ScatterJob& job = jobs[turn];
    if (job.end) return;
    if (thread < 32) feed.next(jobs[turn ^ 1]);
    copy_tile<kGroup>(job, thread, tile, sync);
  }
}

__global__ void __launch_bounds__(kScatterThreads, kBlocksPerMultiprocessor) scatter_kernel(ScatterTiles list) {
  __shared__ ScatterJob jobs[2];
  __shared__ TransposeTile tile;
  run_threads<kScatterThreads>(list, threadIdx.x, jobs, tile, [] { __syncthreads(); });
}

// The first warp copies the bulk list, the other warps the rest at the same time.
__global__ void __launch_bounds__(kThreadsBeside + 32, kBlocksPerMultiprocessor) scatter_bulk_kernel(ScatterWork work) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ ScatterJob jobs[2];
  __shared__ TransposeTile tile;
  __shared__ BulkState state;
  if (threadIdx.x < 32) {
    run_bulk(work.bulk, state, stages);
  } else {
    run_threads<kThreadsBeside>(work.threads, threadIdx.x - 32, jobs, tile, [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kThreadsBeside) : "memory");
    });
  }
#endif
}

}  // namespace

void launch_scatter(const ScatterWork& work, cudaStream_t stream, unsigned most_blocks) {
  const uint64_t tiles = uint64_t{work.threads.tiles} + work.bulk.tiles;
  if (tiles == 0) return;
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const uint64_t resident = static_cast<uint64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  const auto blocks = static_cast<unsigned>(std::min({tiles, resident, uint64_t{most_blocks}}));
  if (work.bulk.tiles > 0) {
    constexpr int kShared = kBulkStages * kBulkBytes;
    check(cudaFuncSetAttribute(scatter_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "cudaFuncSetAttribute(scatter)");
    scatter_bulk_kernel<<<blocks, kThreadsBeside + 32, kShared, stream>>>(work);
  } else {
    scatter_kernel<<<blocks, kScatterThreads, 0, stream>>>(work.threads);
  }
  check_launch("scatter");
}

}  // namespace refit::cuda
