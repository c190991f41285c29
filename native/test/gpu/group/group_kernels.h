// The kernels of group_test: bytes of broadcasts, and a comparison with them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::group_test {

// Byte i of broadcast number `seed`.
__host__ __device__ inline uint8_t value(uint64_t seed, uint64_t i) {
  uint64_t z = seed * 0x9e3779b97f4a7c15u + (i >> 2) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  // No NaN in Elements, so that a scatter may convert it.
  const auto byte = static_cast<uint8_t>(z >> (8 * (i & 3)));
  return (i & 1) != 0 ? byte & 0x3f : byte;
}

void fill(uint8_t* out, uint64_t count, uint64_t seed, cudaStream_t stream);

struct Wrong {
  unsigned long long count, first;
};

// Compares `data` with bytes [from, from + count) of broadcast `seed`, on the default stream.
void count_wrong(const uint8_t* data, uint64_t count, uint64_t seed, uint64_t from, Wrong* wrong);

}  // namespace refit::group_test
