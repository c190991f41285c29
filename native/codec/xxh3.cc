#include "codec/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace refit {
namespace {

static_assert(std::endian::native == std::endian::little);
using u128 = unsigned __int128;

constexpr uint64_t kPrime32_1 = 0x9E3779B1U;
constexpr uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kMix1 = 0x165667919E3779F9ULL;
constexpr uint64_t kMix2 = 0x9FB21C651E98DF25ULL;
constexpr size_t kSecretBytes = 192;
alignas(8) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

template <typename T>
T word(const uint8_t* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}

uint64_t word64(const uint8_t* at) { return word<uint64_t>(at); }
uint64_t secret(size_t at) { return word64(kSecret + at); }

struct Digest {
  uint64_t low, high;
};

uint64_t avalanche(uint64_t x) {
  x = (x ^ (x >> 37)) * kMix1;
  return x ^ (x >> 32);
}

uint64_t avalanche64(uint64_t x) {
  x = (x ^ (x >> 33)) * kPrime2;
  x = (x ^ (x >> 29)) * kPrime3;
  return x ^ (x >> 32);
}

uint64_t folded(uint64_t a, uint64_t b) {
  const u128 product = static_cast<u128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

Digest of_1_to_3(const uint8_t* in, size_t size) {
  const uint32_t combined = in[size - 1] | static_cast<uint32_t>(size) << 8 | static_cast<uint32_t>(in[0]) << 16 |
                            static_cast<uint32_t>(in[size >> 1]) << 24;
  const uint64_t low = (word<uint32_t>(kSecret) ^ word<uint32_t>(kSecret + 4)) ^ static_cast<uint64_t>(combined);
  const uint64_t high = (word<uint32_t>(kSecret + 8) ^ word<uint32_t>(kSecret + 12)) ^
                        static_cast<uint64_t>(std::rotl(__builtin_bswap32(combined), 13));
  return {avalanche64(low), avalanche64(high)};
}

Digest of_4_to_8(const uint8_t* in, size_t size) {
  const uint64_t combined = word<uint32_t>(in) | static_cast<uint64_t>(word<uint32_t>(in + size - 4)) << 32;
  const uint64_t value = (secret(16) ^ secret(24)) ^ combined;
  const u128 product = static_cast<u128>(value) * (kPrime1 + (size << 2));
  auto high = static_cast<uint64_t>(product >> 64);
  auto low = static_cast<uint64_t>(product);
  high += low << 1;
  low ^= high >> 3;
  low = (low ^ (low >> 35)) * kMix2;
  return {low ^ (low >> 28), avalanche(high)};
}

Digest of_9_to_16(const uint8_t* in, size_t size) {
  const uint64_t first = word64(in);
  const uint64_t last = word64(in + size - 8);
  const uint64_t one = (secret(32) ^ secret(40)) ^ first ^ last;
  const uint64_t two = (secret(48) ^ secret(56)) ^ last;
  const u128 product = static_cast<u128>(one) * kPrime1;
  uint64_t low = static_cast<uint64_t>(product) + (static_cast<uint64_t>(size - 1) << 54);
  const uint64_t high = static_cast<uint64_t>(product >> 64) + two + (two & 0xFFFFFFFFU) * (kPrime32_2 - 1);
  low ^= __builtin_bswap64(high);
  const u128 second = static_cast<u128>(low) * kPrime2;
  return {avalanche(static_cast<uint64_t>(second)), avalanche(static_cast<uint64_t>(second >> 64) + high * kPrime2)};
}

uint64_t mix(const uint8_t* in, size_t at, uint64_t seed) {
  return folded(word64(in) ^ (secret(at) + seed), word64(in + 8) ^ (secret(at + 8) - seed));
}

void mix_two(uint64_t (&lanes)[2], const uint8_t* a, const uint8_t* b, size_t at, uint64_t seed = 0) {
  lanes[0] += mix(a, at, seed);
  lanes[1] += mix(b, at + 16, seed);
  lanes[0] ^= word64(b) + word64(b + 8);
  lanes[1] ^= word64(a) + word64(a + 8);
}

Digest of_17_to_240(const uint8_t* in, size_t size) {
  uint64_t lanes[2] = {size * kPrime1, 0};
  if (size <= 128) {
    for (size_t i = ((size - 1) >> 5) + 1; i-- > 0;) mix_two(lanes, in + i * 16, in + size - i * 16 - 16, i * 32);
  } else {
    for (size_t i = 0; i < 4; i++) mix_two(lanes, in + i * 32, in + i * 32 + 16, i * 32);
    for (uint64_t& lane : lanes) lane = avalanche(lane);
    for (size_t i = 4; i < size >> 5; i++) mix_two(lanes, in + i * 32, in + i * 32 + 16, (i - 4) * 32 + 3);
    mix_two(lanes, in + size - 16, in + size - 32, 103);
  }
  const uint64_t high = lanes[0] * kPrime1 + lanes[1] * kPrime4 + size * kPrime2;
  return {avalanche(lanes[0] + lanes[1]), 0 - avalanche(high)};
}

void accumulate(uint64_t (&lanes)[8], const uint8_t* stripe, size_t at) {
  for (size_t i = 0; i < 8; i++) {
    const uint64_t data = word64(stripe + 8 * i);
    const uint64_t value = data ^ secret(at + 8 * i);
    lanes[i ^ 1] += data;
    lanes[i] += (value & 0xFFFFFFFFU) * (value >> 32);
  }
}

uint64_t merge(const uint64_t (&lanes)[8], uint64_t start, size_t at) {
  for (size_t i = 0; i < 8; i += 2)
    start += folded(lanes[i] ^ secret(at + 8 * i), lanes[i + 1] ^ secret(at + 8 * i + 8));
  return avalanche(start);
}

Digest small(const uint8_t* in, size_t size) {
  if (size == 0) return {avalanche64(secret(64) ^ secret(72)), avalanche64(secret(80) ^ secret(88))};
  if (size <= 3) return of_1_to_3(in, size);
  if (size <= 8) return of_4_to_8(in, size);
  if (size <= 16) return of_9_to_16(in, size);
  return of_17_to_240(in, size);
}

}  // namespace

void Xxh3::round(const uint8_t* block) {
  for (size_t n = 0; n < kBlock / 64; n++) accumulate(lanes_, block + 64 * n, 8 * n);
  for (size_t i = 0; i < 8; i++) {
    lanes_[i] ^= lanes_[i] >> 47;
    lanes_[i] = (lanes_[i] ^ secret(kSecretBytes - 64 + 8 * i)) * kPrime32_1;
  }
  memcpy(before_, block + kBlock - 64, 64);
}

void Xxh3::update(const uint8_t* data, size_t size) {
  total_ += size;
  while (size > 0) {
    if (filled_ == kBlock) {
      round(block_);
      filled_ = 0;
    }
    if (filled_ == 0) {
      for (; size > kBlock; data += kBlock, size -= kBlock) round(data);
    }
    const size_t part = std::min(size, kBlock - filled_);
    memcpy(block_ + filled_, data, part);
    filled_ += part;
    data += part;
    size -= part;
  }
}

std::string Xxh3::hex() const {
  Digest digest{};
  if (total_ <= 240) {
    digest = small(block_, filled_);
  } else {
    uint64_t lanes[8];
    memcpy(lanes, lanes_, sizeof lanes);
    for (size_t n = 0; n < (filled_ - 1) / 64; n++) accumulate(lanes, block_ + 64 * n, 8 * n);
    uint8_t last[64];
    const size_t own = std::min<size_t>(filled_, 64);
    memcpy(last, before_ + own, 64 - own);
    memcpy(last + 64 - own, block_ + filled_ - own, own);
    accumulate(lanes, last, kSecretBytes - 71);
    digest = {merge(lanes, total_ * kPrime1, 11), merge(lanes, ~(total_ * kPrime2), kSecretBytes - 75)};
  }
  char text[33];
  snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
           static_cast<unsigned long long>(digest.low));
  return text;
}

}  // namespace refit
