// Programmatic dependent launch (sm_90 and later): a kernel that begins while the one before it on the stream still
// runs, so that it can load what that one does not write. On older GPUs such a kernel begins afterwards, as usual.
#pragma once
#include <cuda_runtime.h>

#include <utility>

#include "cuda/device/check.h"
#include "cuda/device/current_gpu.h"

namespace refit::cuda {

// Waits until the kernels before have ended and their writes are visible. Every thread of an early kernel calls it
// before its first access to memory that they write or read, and before it returns: then the kernels before the one
// before have ended, too. What they write must not be read by ld.global.nc (__ldg, const __restrict__): such loads may
// move before the wait. Weights, the step's block and keys of earlier steps may be read before it: no step runs beside
// a write of weights, and a step begins with a copy or as a graph, for which nothing begins early.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets an early kernel behind this one begin when all blocks of this one have called it. Without one it does nothing.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline bool launches_early() {
  static const bool can = current_gpu_attribute(cudaDevAttrComputeCapabilityMajor, "the compute capability") >= 9;
  return can;
}

// Launches a kernel that calls wait_for_kernel_before. early: it may begin early. shared_bytes: of dynamic shared
// memory.
template <class... Parameters, class... Arguments>
void launch_early_shared(void (*kernel)(Parameters...), bool early, dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream, const char* name, Arguments&&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && launches_early() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), bool early, dim3 grid, int threads, cudaStream_t stream,
                  const char* name, Arguments&&... arguments) {
  launch_early_shared(kernel, early, grid, threads, 0, stream, name, std::forward<Arguments>(arguments)...);
}

}  // namespace refit::cuda
