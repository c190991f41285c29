// Compiled with -mavx2 -mfma; called only if the CPU has both.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

namespace refit::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 8;
  __m256 x;

  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec widen(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  static Vec broadcast(float f) { return {_mm256_set1_ps(f)}; }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
};

inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }

constexpr int kColumns = 2;

}  // namespace
}  // namespace refit::cpu

#include "cpu/attention/attention_tile_impl.h"

namespace refit::cpu {
const AttentionTile kAttentionAvx2 = kTile;
}
#endif
