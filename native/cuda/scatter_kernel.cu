#include <algorithm>
#include <stdexcept>

#include "cuda/check.h"
#include "cuda/scatter_bulk.cuh"
#include "cuda/scatter_kernel.h"
#include "cuda/scatter_tile.cuh"

namespace refit::cuda {
namespace {

// Warps of a block that copy while one looks for the next tile: all of them copy, the first one looks before it does.
template <int kThreads, int kUnroll, int kHint, bool kDynamic, typename Sync>
__device__ __forceinline__ void run_threads(const ScatterTiles& list, uint32_t* counter, uint32_t thread,
                                            ScatterJob (&jobs)[2], TransposeTile& tile, Sync sync) {
  TileFeed<kDynamic> feed(list, counter);
  if (thread < 32) {
    feed.ask();
    feed.next(jobs[0]);
  }
  for (uint32_t turn = 0;; turn ^= 1) {
    // One barrier a tile: behind it the job is there, and nobody reads the other one any more.
    sync();
    const ScatterJob& job = jobs[turn];
    if (job.end) return;
    if (thread < 32) feed.next(jobs[turn ^ 1]);
    copy_tile<kThreads, kUnroll, kHint>(job, thread, tile, sync);
  }
}

template <int kThreads, int kUnroll, int kHint, bool kDynamic, int kResident>
__global__ void __launch_bounds__(kThreads, kResident / kThreads) scatter_kernel(ScatterWork work) {
  __shared__ ScatterJob jobs[2];
  __shared__ TransposeTile tile;
  run_threads<kThreads, kUnroll, kHint, kDynamic>(work.threads, work.thread_counter, threadIdx.x, jobs, tile,
                                                  [] { __syncthreads(); });
}

// The first warp moves the bulk list, the others the rest, side by side.
template <int kThreads, int kUnroll, int kStages, bool kDynamic>
__global__ void __launch_bounds__(kThreads + 32, 2) scatter_bulk_kernel(ScatterWork work, uint32_t stage_bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ ScatterJob jobs[2];
  __shared__ TransposeTile tile;
  __shared__ BulkState<kStages> state;
  if (threadIdx.x < 32) {
    run_bulk<kStages, kDynamic>(work.bulk, work.bulk_counter, state, stages, stage_bytes);
  } else {
    run_threads<kThreads, kUnroll, 0, kDynamic>(work.threads, work.thread_counter, threadIdx.x - 32, jobs, tile, [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    });
  }
#endif
}

template <typename Kernel, typename... Args>
void launch(Kernel kernel, int threads, size_t shared, uint64_t tiles, const ScatterTuning& tuning, cudaStream_t stream,
            Args... args) {
  int device = 0, sms = 0, fit = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (shared > 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "cudaFuncSetAttribute(scatter)");
  }
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, shared), "cudaOccupancy(scatter)");
  if (fit < 1) throw std::invalid_argument("scatter: the stages do not fit into shared memory");
  if (tuning.blocks_per_sm > 0) fit = std::min(fit, tuning.blocks_per_sm);
  const auto blocks = static_cast<unsigned>(std::min<uint64_t>(tiles, static_cast<uint64_t>(sms) * fit));
  kernel<<<blocks, threads, shared, stream>>>(args...);
  check_launch("scatter");
}

template <int kThreads, int kUnroll, int kHint, bool kDynamic = true, int kResident = 1024>
void launch_threads(const ScatterWork& work, const ScatterTuning& tuning, cudaStream_t stream) {
  launch(scatter_kernel<kThreads, kUnroll, kHint, kDynamic, kResident>, kThreads, 0, work.threads.tiles, tuning, stream,
         work);
}

template <int kStages>
void launch_bulk(const ScatterWork& work, const ScatterTuning& tuning, cudaStream_t stream) {
  constexpr int kThreads = 256;
  launch(scatter_bulk_kernel<kThreads, 4, kStages, true>, kThreads + 32,
         static_cast<size_t>(kStages) * tuning.bulk_bytes, static_cast<uint64_t>(work.threads.tiles) + work.bulk.tiles,
         tuning, stream, work, tuning.bulk_bytes);
}

}  // namespace

void launch_scatter(const ScatterWork& work, const ScatterTuning& tuning, cudaStream_t stream) {
  if (work.threads.tiles == 0 && work.bulk.tiles == 0) return;
  const int key = tuning.threads * 100 + tuning.unroll * 10 + tuning.hint + (tuning.dynamic ? 0 : 1000000) +
                  (tuning.threads * tuning.blocks_per_sm > 1024 ? 2000000 : 0);
  if (work.bulk.tiles > 0) {
    if (tuning.bulk_stages == 4) return launch_bulk<4>(work, tuning, stream);
    if (tuning.bulk_stages == 6) return launch_bulk<6>(work, tuning, stream);
  } else {
    if (key == 51240) return launch_threads<512, 4, 0>(work, tuning, stream);
    if (key == 51241) return launch_threads<512, 4, 1>(work, tuning, stream);
    if (key == 51242) return launch_threads<512, 4, 2>(work, tuning, stream);
    if (key == 51280) return launch_threads<512, 8, 0>(work, tuning, stream);
    if (key == 25640) return launch_threads<256, 4, 0>(work, tuning, stream);
    if (key == 25680) return launch_threads<256, 8, 0>(work, tuning, stream);
    if (key == 2051240) return launch_threads<512, 4, 0, true, 2048>(work, tuning, stream);
    if (key == 2025640) return launch_threads<256, 4, 0, true, 2048>(work, tuning, stream);
    if (key == 1051240) return launch_threads<512, 4, 0, false>(work, tuning, stream);
  }
  throw std::invalid_argument("scatter: this tuning is not built");
}

}  // namespace refit::cuda
