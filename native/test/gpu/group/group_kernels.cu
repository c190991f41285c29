#include <cuda_runtime.h>

#include "test/gpu/group/group_kernels.h"

namespace refit::group_test {
namespace {

__global__ void fill_kernel(uint8_t* out, uint64_t count, uint64_t seed) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    out[i] = value(seed, i);
  }
}

__global__ void count_wrong_kernel(const uint8_t* data, uint64_t count, uint64_t seed, uint64_t from, Wrong* wrong) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    if (data[i] == value(seed, from + i)) continue;
    atomicAdd(&wrong->count, 1ull);
    atomicMin(&wrong->first, static_cast<unsigned long long>(i));
  }
}

}  // namespace

void fill(uint8_t* out, uint64_t count, uint64_t seed, cudaStream_t stream) {
  fill_kernel<<<512, 256, 0, stream>>>(out, count, seed);
}

void count_wrong(const uint8_t* data, uint64_t count, uint64_t seed, uint64_t from, Wrong* wrong) {
  count_wrong_kernel<<<512, 256>>>(data, count, seed, from, wrong);
}

}  // namespace refit::group_test
