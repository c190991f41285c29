#include <algorithm>

#include "cuda/check.h"
#include "cuda/scatter_kernel.h"
#include "cuda/scatter_tile.cuh"

namespace refit::cuda {
namespace {

// Two blocks on a multiprocessor: of what was tried on H100 and H200 (256 threads, more blocks, 8 loads in flight,
// plain stores, bulk copies through shared memory) nothing was faster.
constexpr int kBlocksPerMultiprocessor = 2;

__global__ void __launch_bounds__(kScatterThreads, kBlocksPerMultiprocessor) scatter_kernel(ScatterTiles list) {
  __shared__ ScatterJob jobs[2];
  __shared__ TransposeTile tile;
  TileFeed feed(list);
  if (threadIdx.x < 32) {
    feed.ask();
    feed.next(jobs[0]);
  }
  for (uint32_t turn = 0;; turn ^= 1) {
    // One barrier a tile: behind it the job is there, and nobody reads the other one any more.
    __syncthreads();
    const ScatterJob& job = jobs[turn];
    if (job.end) return;
    // The first warp looks for the next tile before it copies.
    if (threadIdx.x < 32) feed.next(jobs[turn ^ 1]);
    copy_tile(job, tile);
  }
}

}  // namespace

void launch_scatter(const ScatterTiles& list, cudaStream_t stream) {
  if (list.tiles == 0) return;
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const auto most = static_cast<uint32_t>(multiprocessors * kBlocksPerMultiprocessor);
  scatter_kernel<<<std::min(list.tiles, most), kScatterThreads, 0, stream>>>(list);
  check_launch("scatter");
}

}  // namespace refit::cuda
