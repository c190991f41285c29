// BLAKE2b without a key (RFC 7693; Aumasson, Neves, Wilcox-O'Hearn, Winnerlein).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace refit {

// A digest of `bytes` bytes, 1 to 64. A shorter digest is not a prefix of a longer one.
std::vector<uint8_t> blake2b(const uint8_t* data, uint64_t size, size_t bytes);

}  // namespace refit
