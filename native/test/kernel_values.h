// Values for the tests of the CPU's kernels: noise, comparisons of bits, and memory that ends at an unreadable page.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace refit::test {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kPoison = -777.25f;

inline std::mt19937_64 rng(20240607);

inline std::vector<float> normal(int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(rng);
  return v;
}

inline std::vector<uint16_t> to_bf16(const std::vector<float>& v) {
  std::vector<uint16_t> out(v.size());
  for (size_t i = 0; i < v.size(); i++) out[i] = float_to_bf16(v[i]);
  return out;
}

inline bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }
inline bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * 4) == 0;
}

// Memory that ends at an unreadable page: a read past the end is a crash, in assembler as well.
class Fenced {
 public:
  Fenced(const void* data, size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<uint8_t*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + bytes_ - page, page, PROT_NONE);
    data_ = base_ + bytes_ - page - bytes;
    if (bytes > 0) std::memcpy(data_, data, bytes);
  }
  ~Fenced() { munmap(base_, bytes_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* base_;
  uint8_t* data_;
  size_t bytes_;
};

}  // namespace refit::test
