// Loading kernels before their first launch, which would otherwise load them while others wait.
#pragma once
#include <cuda_runtime.h>

#include "cuda/device/check.h"

namespace refit::cuda {

// Loads the kernels onto the current GPU. `action` begins the error's text.
template <class... Kernels>
void load_kernels(const char* action, Kernels... kernels) {
  cudaFuncAttributes attributes;
  (check(cudaFuncGetAttributes(&attributes, kernels), action), ...);
}

}  // namespace refit::cuda
