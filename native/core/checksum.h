// The checksum of docs/checksum.md, a sum mod 2^64 over elements, so the partial sums of ranks add up; and the noise of
// Store::scramble. Device code includes this file too.
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"

namespace refit {

// The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014, as in Vigna's
// public-domain splitmix64.c).
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

REFIT_HOST_DEVICE constexpr uint64_t splitmix64_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Elements that share a factor; within such a group element j has the factor kChecksumBase^j.
constexpr int kChecksumGroup = 8;
// A multiplier of good spectrum for linear congruential generators mod 2^64 (Steele and Vigna: Computationally easy,
// spectrally good multipliers for congruential pseudorandom number generators, 2021).
constexpr uint64_t kChecksumBase = 0xD1342543DE82EF95u;

REFIT_HOST_DEVICE constexpr uint64_t checksum_weight(int j) {
  uint64_t power = 1;
  for (int k = 0; k < j; k++) power *= kChecksumBase;
  return power;
}

// The factor of the elements [8 group, 8 group + 8) of a checkpoint tensor. It is odd, as the weights are, so a changed
// element always changes the sum.
REFIT_HOST_DEVICE constexpr uint64_t checksum_factor(uint64_t group) {
  return splitmix64_mix((group + 1) * kGolden) | 1;
}

// Sum over n contiguous stored elements whose indices in the checkpoint tensor are first, first + 1, ...
// data is aligned to its element.
uint64_t checksum_run(const void* data, DType dtype, uint64_t first, int64_t n);

// The key of one parameter: `address` counts parameters rank by rank.
REFIT_HOST_DEVICE constexpr uint64_t scramble_key(uint64_t seed, uint64_t address) {
  return splitmix64_mix(seed ^ (address + 1) * kGolden);
}

// Element `index` of a parameter, in [-1, 1): 24 random bits, signed, over 2^23; exact in fp32.
REFIT_HOST_DEVICE inline float scramble_noise(uint64_t key, int64_t index) {
  const uint64_t bits = splitmix64_mix(key + static_cast<uint64_t>(index + 1) * kGolden);
  return static_cast<float>(static_cast<int32_t>(bits >> 32) >> 8) * 0x1p-23f;
}

}  // namespace refit
