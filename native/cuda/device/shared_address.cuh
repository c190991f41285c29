// Addresses as instructions for shared memory take them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace refit::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace refit::cuda
