// Kernels that tests of matrix products share. g++ compiles the tests themselves, in a fraction of nvcc's time.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::test {

// A number in [-1, 1) for a position; `seed` selects the sequence.
__host__ __device__ inline float noise(uint64_t at, uint64_t seed) {
  uint64_t z = at * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;  // the mixer of splitmix64 (Steele, Lea, Flood)
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<int32_t>(z >> 32)) * 0x1p-31f;
}

// Writes numbers to a matrix and leaves the memory between its rows unchanged.
void fill(cuda::Element* to, int64_t rows, int64_t columns, int64_t ld, float scale, uint64_t seed);

// sum[m, n] = x[m] w[n] + bias[n] in double, and size[m, n] the same of absolute values: the measure of error.
void launch_reference(int64_t M, int64_t N, int64_t K, const cuda::Element* x, int64_t ldx, const cuda::Element* w,
                      const cuda::Element* bias, double* sum, double* size);

// Reads the buffer with `blocks` blocks of 512 threads. A sum may go to `to`, so the compiler keeps the reads.
void launch_read(int blocks, const void* from, size_t bytes, uint32_t* to);

// Blocks the GPU until the word is not 0.
void launch_hold(const volatile uint32_t* let_go);

}  // namespace refit::test
