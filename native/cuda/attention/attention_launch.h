// Settings of a kernel, made once per GPU.
#pragma once
#include <atomic>
#include <cstdint>

#include "cuda/device/check.h"

namespace refit::cuda {

// Allows a kernel `bytes` of shared memory, once per GPU. carveout: per cent of L1 that become shared memory. `done`:
// one bit per GPU.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes, int carveout, std::atomic<uint64_t>& done) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((done.load(std::memory_order_acquire) & bit) != 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attention: shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout),
        "attention: shared memory");
  done.fetch_or(bit, std::memory_order_release);
}

}  // namespace refit::cuda
