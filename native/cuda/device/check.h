// Throws CUDA runtime errors as exceptions that name the operation.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace refit::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const std::string& operation)
      : std::runtime_error(operation + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")"),
        code(code) {}
  const cudaError_t code;
};

inline void check(cudaError_t code, const char* operation) {
  if (code != cudaSuccess) throw CudaError(code, operation);
}

// Call it after a kernel launch. It checks the launch, not the execution.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace refit::cuda
