// Makes compressed changes of tensors, valid and hostile, and files to apply them to.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "codec/tensor_delta.h"
#include "codec/xxh3.h"
#include "codec/zstd_stream.h"
#include "test/check.h"

namespace refit::test::delta_world {

using Bytes = std::vector<uint8_t>;
constexpr size_t kMiB = 1 << 20;

// The buffer of xxHash's own tests (tests/sanity_test.c).
inline Bytes sanity(size_t size) {
  Bytes bytes(size);
  uint64_t state = 2654435761U;
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(state >> 56);
    state *= 11400714785074694797U;
  }
  return bytes;
}

struct Vector {
  size_t size;
  const char *xxh3, *adler32;
};

// Checksums of the first bytes of that buffer, from xxHash 0.8.3 and zlib. The lengths reach every branch of the
// specification and both sides of each border between branches.
constexpr Vector kVectors[] = {
    {0, "99aa06d3014798d86001c324468d497f", "00000001"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb", "00010001"},
    {2, "76750c3c7bf956687a9978044cb8a8bb", "00540053"},    {3, "20efc49ff02422ea54247382a8d6b94d", "013900e5"},
    {4, "970d585ac632bf8e2e7d8d6876a39fe9", "02b90180"},    {6, "082afe0b8162d12a3e7039bdda43cfc6", "07590269"},
    {8, "47a7f080d82bb45664c69cab4bb21dc5", "0d950330"},    {9, "564ef6078950d457ed7ccbc501eb7501", "10f2035d"},
    {12, "6e3efd8fc7802b18061a192713f69ad9", "1cfc04a1"},   {16, "c68c368ecf8a9c05562980258a998629", "347f06e6"},
    {17, "955fa78643ed3669abbc12d11973d7db", "3c4807c9"},   {24, "0ce966e4678d37611e7044d28b1b901d", "88470ca1"},
    {48, "a002ac4e5478227ef942219aed80f67b", "4e5818c8"},   {80, "fdf2cefde9eaac8a454ae6bf7a8a532d", "6b4a28ad"},
    {128, "39992220e045260aebb15e34a7fb5ab1", "4aaf40e9"},  {129, "03815fc91f1b30b686c9e3bc8f0a3b5c", "8c8b41dc"},
    {195, "7729543a26b207ee3fb593c086a66075", "856f6680"},  {222, "337e09641b948717f1aebd597cec6b3a", "2df974c4"},
    {240, "aa4202daa2769dc85c9aae94c8ebe5a0", "b4707e46"},  {241, "99a80ecf0ecfc647c5a639ecd2030e5e", "33aa7f2b"},
    {403, "1b6de21e332dd73dcdeb804d65c6dea4", "f162d4f3"},  {512, "18d2d110dcc9bca1617e49599013cb6b", "517b0a3e"},
    {1024, "0d30d24071c64c57dd85c9b5c1109c5c", "ef520479"}, {1025, "fd3ee4fe7f2954c6d870c0fa13211c6a", "f4c1056f"},
    {2048, "f736557fd47073a5dd59e2c3a5f038e0", "a50405f5"}, {2240, "ccb134fbfa7ce49d6e73a90539cf2948", "d6a76751"},
    {2367, "e89c0f6ff369b427cb37aeb9e5d361ed", "2cbca688"}, {4096, "b9cfaea2ca5626a4e91206429d1f48f9", "8294fdbd"},
    {4113, "83c02dcc7a80659601f24dfb53ed6d89", "af00075e"}};

// Zstandard frames that are written by hand (RFC 8878, 3.1.1): raw blocks, or blocks of one repeated byte, where four
// bytes decompress to 128 KiB.
class Frame {
 public:
  // The header has no content size and a window of 2^(10 + exponent) bytes.
  explicit Frame(int exponent = 10) : bytes_{0x28, 0xb5, 0x2f, 0xfd, 0x00, static_cast<uint8_t>(exponent << 3)} {}
  Frame& raw(const Bytes& data) {
    head(0, data.size());
    bytes_.insert(bytes_.end(), data.begin(), data.end());
    return *this;
  }
  Frame& repeat(uint8_t byte, size_t count) {
    head(1, count);
    bytes_.push_back(byte);
    return *this;
  }
  // An empty last block.
  Bytes end() {
    bytes_.insert(bytes_.end(), {1, 0, 0});
    return bytes_;
  }

 private:
  void head(uint32_t type, size_t size) {
    const auto word = static_cast<uint32_t>(size << 3 | type << 1);
    bytes_.insert(bytes_.end(),
                  {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word >> 16)});
  }
  Bytes bytes_;
};

// Compresses as trainers do: libzstd, level 1.
inline Bytes compressed(const Bytes& data) {
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  static auto* const compress =
      reinterpret_cast<size_t (*)(void*, size_t, const void*, size_t, int)>(dlsym(library, "ZSTD_compress"));
  Bytes out(data.size() + data.size() / 128 + 1024);
  out.resize(compress(out.data(), out.size(), data.data(), data.size(), 1));
  return out;
}

// A file in memory.
class File {
 public:
  explicit File(const Bytes& bytes) : fd_(memfd_create("delta_test", MFD_CLOEXEC)), size_(bytes.size()) {
    CHECK(fd_ >= 0);
    CHECK(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  Bytes bytes() const {
    Bytes out(size_);
    CHECK(pread(fd_, out.data(), out.size(), 0) == static_cast<ssize_t>(out.size()));
    CHECK(lseek(fd_, 0, SEEK_END) == static_cast<off_t>(size_));
    return out;
  }

 private:
  int fd_;
  size_t size_;
};

inline Bytes noise(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

inline Bytes xor_of(const Bytes& a, const Bytes& b) {
  Bytes out(a.size());
  for (size_t i = 0; i < a.size(); i++) out[i] = a[i] ^ b[i];
  return out;
}

inline void add_word(Bytes& out, uint32_t word) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<uint8_t>(word >> shift));
}

inline Bytes overwrite_of(const Bytes& before, const Bytes& after) {
  Bytes at, values;
  for (size_t i = 0; i < after.size(); i++) {
    if (before[i] == after[i]) continue;
    add_word(at, static_cast<uint32_t>(i));
    values.push_back(after[i]);
  }
  Bytes out;
  add_word(out, static_cast<uint32_t>(values.size()));
  out.insert(out.end(), at.begin(), at.end());
  out.insert(out.end(), values.begin(), values.end());
  return out;
}

inline std::string xxh3(const Bytes& bytes) {
  Xxh3 hash;
  hash.update(bytes.data(), bytes.size());
  return hash.hex();
}

// Applies one delta and returns the error; empty if there is none.
inline std::string refusal(const Bytes& change, DeltaEncoding encoding, const Bytes& before, uint64_t offset,
                           uint64_t size, Bytes* after = nullptr) {
  const File file(before);
  std::string why;
  try {
    apply_deltas({{file.fd(), offset, size, change.data(), change.size()}}, encoding, DeltaChecksum::kXxh3, 1);
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  const Bytes bytes = file.bytes();
  // Bytes outside the tensor never change.
  for (size_t i = 0; i < before.size(); i++) {
    if (i >= offset && i - offset < size) continue;
    if (!CHECKF(bytes[i] == before[i], "byte %zu lies outside of [%lu, %lu)", i, offset, offset + size)) break;
  }
  if (after != nullptr) *after = bytes;
  return why;
}

#define CHECK_REFUSED(why, text)                                    \
  do {                                                              \
    const std::string got = (why);                                  \
    CHECKF(got.find(text) != std::string::npos, "%s", got.c_str()); \
  } while (false)

}  // namespace refit::test::delta_world
