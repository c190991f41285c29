// Injected GPU faults, for tests. REFIT_CUDA_FAULT="illegal:N" writes to an unmapped address in the middle of step N
// on rank 0; "illegal:N:R" does so on rank R; "hang:N:R" launches a kernel that never ends.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::cuda {

struct Fault {
  enum class Kind : uint8_t { kNone, kIllegal, kHang };
  Kind kind = Kind::kNone;
  int64_t step = 0;
  int rank = 0;
};

// Reads the environment; throws std::invalid_argument for an unknown spelling.
Fault fault_from_environment();

void launch_fault(Fault::Kind kind, cudaStream_t stream);

}  // namespace refit::cuda
