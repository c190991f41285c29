// The checksum of docs/checksum.md: sums of mixed (index, bits) pairs mod 2^64, so that shares of ranks add up.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace refit {

// The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014, as in Vigna's
// public-domain splitmix64.c).
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

constexpr uint64_t splitmix64_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Sum over n contiguous stored elements whose indices in the checkpoint tensor are first, first + 1, ...
// data is aligned to its element.
uint64_t checksum_run(const void* data, DType dtype, uint64_t first, int64_t n);

}  // namespace refit
