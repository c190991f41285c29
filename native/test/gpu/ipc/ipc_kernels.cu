#include <cuda_runtime.h>

#include "test/gpu/ipc/ipc_kernels.h"

namespace refit::ipc_test {
namespace {

// The value of element i of segment s: any bits except NaN.
__device__ uint16_t value(uint64_t seed, uint64_t segment, uint64_t i) {
  uint64_t z = (seed * 0x9e3779b97f4a7c15u + segment) * 0xbf58476d1ce4e5b9u + i;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint16_t>((z ^ (z >> 31)) & 0x3fff);
}

__global__ void fill_kernel(uint16_t* out, uint64_t count, uint64_t seed, uint64_t segment) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    out[i] = value(seed, segment, i);
  }
}

__global__ void count_wrong_kernel(const uint16_t* param, uint64_t count, uint64_t from, uint64_t seed,
                                   uint64_t segment, Wrong* wrong) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    if (param[i] == value(seed, segment, from + i)) continue;
    atomicAdd(&wrong->count, 1ull);
    atomicMin(&wrong->first, static_cast<unsigned long long>(i));
  }
}

__global__ void spin_kernel(uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

void fill(uint16_t* out, uint64_t count, uint64_t seed, uint64_t segment, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(out, count, seed, segment);
}

void count_wrong(const uint16_t* param, uint64_t count, uint64_t from, uint64_t seed, uint64_t segment, Wrong* wrong,
                 cudaStream_t stream) {
  count_wrong_kernel<<<256, 256, 0, stream>>>(param, count, from, seed, segment, wrong);
}

void spin(uint64_t nanoseconds, cudaStream_t stream) { spin_kernel<<<1, 1, 0, stream>>>(nanoseconds); }

}  // namespace refit::ipc_test
