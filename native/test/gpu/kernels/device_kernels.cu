#include <cuda_runtime.h>

#include "test/gpu/kernels/device_kernels.h"

namespace refit::test {
namespace {

__global__ void fill_words_kernel(uint64_t* words, size_t count, uint64_t key) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    words[i] = (i + 1) * 0x9E3779B97F4A7C15u ^ key;
  }
}

__global__ void count_wrong_words_kernel(const uint64_t* words, size_t count, uint64_t key, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    if (words[i] != ((i + 1) * 0x9E3779B97F4A7C15u ^ key)) atomicAdd(wrong, 1ull);
  }
}

__global__ void nothing_kernel() {}

__global__ void wait_kernel(int ms) {
  const long long until = clock64() + 1'000'000ll * ms;
  while (clock64() < until) {
  }
}

__global__ void add_one_kernel(int* value) { *value += 1; }

}  // namespace

void fill_words(int blocks, uint64_t* words, size_t count, uint64_t key, cudaStream_t stream) {
  fill_words_kernel<<<blocks, 256, 0, stream>>>(words, count, key);
}

void count_wrong_words(const uint64_t* words, size_t count, uint64_t key, unsigned long long* wrong) {
  count_wrong_words_kernel<<<512, 256>>>(words, count, key, wrong);
}

void launch_nothing(cudaStream_t stream) { nothing_kernel<<<1, 1, 0, stream>>>(); }

void launch_wait(int ms, cudaStream_t stream) { wait_kernel<<<1, 1, 0, stream>>>(ms); }

void launch_add_one(int* value, cudaStream_t stream) { add_one_kernel<<<1, 1, 0, stream>>>(value); }

}  // namespace refit::test
