// Facts about the GPU that is current on this thread.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/device/check.h"

namespace refit::cuda {

inline int current_gpu_attribute(cudaDeviceAttr attribute, const char* name) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), name);
  return value;
}

inline int multiprocessors() {
  return current_gpu_attribute(cudaDevAttrMultiProcessorCount, "the number of multiprocessors");
}

// Whether the GPU runs the kernels of files named *_hopper.cu: its compute capability is 9.0.
inline bool has_wgmma() {
  return current_gpu_attribute(cudaDevAttrComputeCapabilityMajor, "the compute capability") == 9 &&
         current_gpu_attribute(cudaDevAttrComputeCapabilityMinor, "the compute capability") == 0;
}

}  // namespace refit::cuda
