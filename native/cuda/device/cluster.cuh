// Clusters of blocks (sm_90 and later): blocks that run at the same time and read each other's shared memory. Kernels
// with them are launched only where launches_clusters() is true; for older GPUs they compile, but do nothing.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/check.h"
#include "cuda/device/early_launch.cuh"

namespace refit::cuda {

// The place of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// A barrier for all threads of a cluster. Shared memory that they wrote before it is visible in all blocks behind it. A
// block whose memory others read must not end before their last read: one more barrier follows that.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Reads from the block `rank` of the cluster what this block has at `own` in its shared memory.
__device__ __forceinline__ float cluster_load(const float* own, int rank) {
  float v = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n"
      "}"
      : "=f"(v)
      : "r"(at), "r"(rank)
      : "memory");
#endif
  return v;
}

inline bool launches_clusters() { return launches_early(); }

// launch_early() of a kernel whose adjacent blocks along x are clusters of `cluster` blocks.
template <class... Parameters, class... Arguments>
void launch_early_clusters(void (*kernel)(Parameters...), bool early, int cluster, dim3 grid, int threads,
                           cudaStream_t stream, const char* name, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace refit::cuda
