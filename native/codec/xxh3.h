#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace refit {

// XXH3 with 128 bits, no seed, the default secret (Yann Collet;
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), of bytes in pieces.
class Xxh3 {
 public:
  void update(const uint8_t* data, size_t size);
  // 32 hexadecimal digits, most significant first. Call it once, at the end.
  std::string hex() const;

 private:
  static constexpr size_t kBlock = 1024;
  void round(const uint8_t* block);

  uint64_t lanes_[8] = {0xC2B2AE3DULL,         0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
                        0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL,         0x27D4EB2F165667C5ULL, 0x9E3779B1ULL};
  uint64_t total_ = 0;
  size_t filled_ = 0;
  uint8_t block_[kBlock] = {};  // kept back, because the last block is hashed in another way
  uint8_t before_[64] = {};     // the last bytes of the block before it
};

}  // namespace refit
