// Faults of a GPU on demand, for tests: REFIT_CUDA_FAULT="illegal:N" writes to an address that nothing is mapped at,
// in the middle of the N-th step, on rank 0; "illegal:N:R" on rank R; "hang:N:R" launches a kernel that never ends.
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

// What the environment asks for; throws std::invalid_argument for a spelling that is not known.
Fault fault_from_environment();

void launch_fault(Fault::Kind kind, cudaStream_t stream);

}  // namespace refit::cuda
