// Numbers, buffers and comparisons for the tests of the small kernels.
#pragma once
#include <algorithm>
#include <cmath>

#include "cpu/forward/forward_common.h"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {

using Values = std::vector<Element>;

inline std::mt19937_64 rng;
inline int64_t below(int64_t n) { return static_cast<int64_t>(rng() % n); }

inline uint16_t bits(Element x) { return element_bits(x); }

// Normal numbers over a wide range, with zeros of both signs.
inline Values random_values(int64_t n, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  Values v(static_cast<size_t>(n));
  for (Element& x : v) {
    const int64_t kind = below(50);
    x = to_element(kind == 0 ? 0.0f : kind == 1 ? -0.0f : kind == 2 ? normal(rng) * 100 : normal(rng));
  }
  return v;
}

inline std::vector<float> widened(const Values& v) {
  std::vector<float> out(v.size());
  for (size_t i = 0; i < v.size(); ++i) out[i] = to_float(v[i]);
  return out;
}

// Every element has the same bits.
inline void check_bits(const std::string& what, const Values& got, const std::vector<float>& expected,
                       int64_t columns) {
  if (!CHECKF(got.size() == expected.size(), "%s: %zu elements, expected %zu", what.c_str(), got.size(),
              expected.size())) {
    return;
  }
  int64_t wrong = 0;
  size_t first = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (bits(got[i]) != bits(to_element(expected[i])) && wrong++ == 0) first = i;
  }
  CHECKF(wrong == 0, "%s: %lld of %zu elements differ; first at row %lld, column %lld: expected %.9g, got %.9g",
         what.c_str(), static_cast<long long>(wrong), got.size(), static_cast<long long>(first / columns),
         static_cast<long long>(first % columns), expected[first], to_float(got[first]));
}

// Every element is within two steps of Element (the two roundings of a norm), and few differ at all.
inline void check_norm(const std::string& what, const Values& got, const std::vector<float>& expected,
                       int64_t columns) {
  int64_t wrong = 0, different = 0;
  size_t first = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const float g = to_float(got[i]);
    different += bits(got[i]) != bits(to_element(expected[i]));
    if (!(std::abs(g - expected[i]) <= 0x1p-6f * std::abs(expected[i]) + 2 * kElementQuantum) && wrong++ == 0)
      first = i;
  }
  CHECKF(got.size() == expected.size() && wrong == 0,
         "%s: %lld of %zu elements are wrong; first at row %lld, column %lld: expected %.9g, got %.9g", what.c_str(),
         static_cast<long long>(wrong), got.size(), static_cast<long long>(first / columns),
         static_cast<long long>(first % columns), expected[first], to_float(got[first]));
  CHECKF(different <= 4 + static_cast<int64_t>(got.size()) / 200, "%s: %lld of %zu elements are other bits",
         what.c_str(), static_cast<long long>(different), got.size());
}

// The CPU's functions with Elements, on one thread.
struct Cpu {
  Pool pool{1};
  cpu::Context ctx{cpu::kernels(""), pool, cuda::kElementType};
};

// `offset` elements in front move a row's begin off the multiples of 16 bytes.
struct Place {
  int64_t offset;
  int64_t size;
  Buffer<Element> buffer;
  Place(int64_t size, int64_t offset) : offset(offset), size(size), buffer(size + offset) {}
  Place(const Values& values, int64_t offset) : Place(static_cast<int64_t>(values.size()), offset) {
    buffer.put(values, offset);
  }
  Element* data() { return buffer.data() + offset; }
  Values get(const std::string& what) {
    buffer.check_guards("a buffer", what);
    for (const Element& x : buffer.get(offset)) CHECKF(bits(x) == 0xffff, "%s: wrote before its rows", what.c_str());
    return buffer.get(size, offset);
  }
};

}  // namespace refit::test
