// Compiled with -mavx512f (and bw, vl, dq); called only if the CPU has them.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

namespace refit::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 16;
  __m512 x;

  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec widen(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec broadcast(float f) { return {_mm512_set1_ps(f)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
};

inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }

constexpr int kColumns = 4;

}  // namespace
}  // namespace refit::cpu

#include "cpu/attention/attention_tile_impl.h"

namespace refit::cpu {
const AttentionTile kAttentionAvx512 = kTile;
}
#endif
