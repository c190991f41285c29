// The kernels of ipc_test: elements of segments, a comparison with them, and one that takes time.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::ipc_test {

void fill(uint16_t* out, uint64_t count, uint64_t seed, uint64_t segment, cudaStream_t stream);

struct Wrong {
  unsigned long long count, first;
};

// Compares `param` with elements [from, from + count) of the segment.
void count_wrong(const uint16_t* param, uint64_t count, uint64_t from, uint64_t seed, uint64_t segment, Wrong* wrong,
                 cudaStream_t stream);

void spin(uint64_t nanoseconds, cudaStream_t stream);

}  // namespace refit::ipc_test
