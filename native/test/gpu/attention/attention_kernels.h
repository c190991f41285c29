// The kernels of wide items, and their names in the output.
#pragma once
#include "cuda/attention/attention.h"

namespace refit::test {

constexpr cuda::WideKernel kWideKernels[] = {cuda::WideKernel::kMma, cuda::WideKernel::kHopper,
                                             cuda::WideKernel::kHopperExact};

inline const char* name_of(cuda::WideKernel wide) {
  switch (wide) {
    case cuda::WideKernel::kMma:
      return "mma";
    case cuda::WideKernel::kHopper:
      return "Hopper";
    default:
      return "exact Hopper";
  }
}

}  // namespace refit::test
