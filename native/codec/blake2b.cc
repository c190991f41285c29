#include "codec/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace refit {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kBlock = 128;
constexpr uint64_t kInit[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                               0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

void compress(uint64_t (&h)[8], const uint8_t* block, uint64_t done, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  std::copy(std::begin(h), std::end(h), v);
  std::copy(std::begin(kInit), std::end(kInit), v + 8);
  v[12] ^= done;
  if (last) v[14] = ~v[14];
  const auto mix = [&v](int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 63);
  };
  for (int round = 0; round < 12; round++) {
    const uint8_t* s = kOrder[round % 10];
    for (int i = 0; i < 4; i++) mix(i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
    for (int i = 0; i < 4; i++)
      mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
  }
  for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

std::vector<uint8_t> blake2b(const uint8_t* data, uint64_t size, size_t bytes) {
  uint64_t h[8];
  std::copy(std::begin(kInit), std::end(kInit), h);
  h[0] ^= 0x01010000 ^ bytes;
  uint64_t done = 0;
  for (; size - done > kBlock; done += kBlock) compress(h, data + done, done + kBlock, false);
  uint8_t last[kBlock] = {};
  if (size > done) std::memcpy(last, data + done, size - done);
  compress(h, last, size, true);
  std::vector<uint8_t> out(bytes);
  std::memcpy(out.data(), h, bytes);
  return out;
}

}  // namespace refit
