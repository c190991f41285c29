// Plain C++ for any machine.
#include <cstdint>
#include <cstring>

namespace refit::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 4;
  float x[4];

  static Vec load(const float* p) {
    Vec r;
    std::memcpy(r.x, p, sizeof r.x);
    return r;
  }
  static Vec widen(const uint16_t* p) {
    Vec r;
    for (int i = 0; i < 4; ++i) {
      const uint32_t u = static_cast<uint32_t>(p[i]) << 16;
      std::memcpy(&r.x[i], &u, sizeof u);
    }
    return r;
  }
  static Vec broadcast(float f) { return {{f, f, f, f}}; }
  void store(float* p) const { std::memcpy(p, x, sizeof x); }
};

inline Vec operator*(Vec a, Vec b) {
  for (int i = 0; i < 4; ++i) a.x[i] *= b.x[i];
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c.x[i] += a.x[i] * b.x[i];
  return c;
}

constexpr int kColumns = 1;

}  // namespace
}  // namespace refit::cpu

#include "cpu/attention/attention_tile_impl.h"

namespace refit::cpu {
const AttentionTile kAttentionScalar = kTile;
}
