#include "core/write/write_convert.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#if !defined(__clang__)
// GCC's own intrinsics for undefined registers look uninitialised to it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace refit {
namespace {

template <typename T>
inline __attribute__((always_inline)) T load(const uint8_t* src, int64_t i) {
  T value;
  std::memcpy(&value, src + i * sizeof(T), sizeof(T));
  return value;
}

inline __attribute__((always_inline)) uint32_t fp16_bits_to_float_bits(uint32_t h) {
  const uint32_t shifted = (h & 0x7fffu) << 13;
  // A subnormal m * 2^-24: put m under the exponent of 2^-14 and take the hidden one away again. This is exact, needs
  // no branch, and no subnormal reaches the FPU, where it would be slow.
  const float hidden = std::bit_cast<float>(113u << 23);
  const float subnormal = std::bit_cast<float>(shifted + (113u << 23)) - hidden;
  const uint32_t normal = shifted + (112u << 23);
  uint32_t bits = (h & 0x7c00u) == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
  bits = (h & 0x7c00u) == 0x7c00u ? (shifted | 0x7f800000u) : bits;
  return bits | ((h & 0x8000u) << 16);
}

inline __attribute__((always_inline)) uint16_t float_bits_to_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// The loops, which are compiled once per instruction set below.
struct Bf16ToFloat {
  static inline __attribute__((always_inline)) void run(const uint8_t* src, uint8_t* dst, int64_t n) {
    uint32_t* out = reinterpret_cast<uint32_t*>(dst);
    for (int64_t i = 0; i < n; i++) out[i] = static_cast<uint32_t>(load<uint16_t>(src, i)) << 16;
  }
};

struct Fp16ToFloat {
  static inline __attribute__((always_inline)) void run(const uint8_t* src, uint8_t* dst, int64_t n) {
    uint32_t* out = reinterpret_cast<uint32_t*>(dst);
    for (int64_t i = 0; i < n; i++) out[i] = fp16_bits_to_float_bits(load<uint16_t>(src, i));
  }
};

struct Fp16ToBf16 {
  static inline __attribute__((always_inline)) void run(const uint8_t* src, uint8_t* dst, int64_t n) {
    uint16_t* out = reinterpret_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; i++) out[i] = float_bits_to_bf16(fp16_bits_to_float_bits(load<uint16_t>(src, i)));
  }
};

struct FloatToBf16 {
  static inline __attribute__((always_inline)) void run(const uint8_t* src, uint8_t* dst, int64_t n) {
    uint16_t* out = reinterpret_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; i++) out[i] = float_bits_to_bf16(load<uint32_t>(src, i));
  }
};

template <typename Body>
void run_base(const uint8_t* src, uint8_t* dst, int64_t n) {
  Body::run(src, dst, n);
}

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx2"))) void run_avx2(const uint8_t* src, uint8_t* dst, int64_t n) {
  Body::run(src, dst, n);
}

template <typename Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void run_avx512(const uint8_t* src, uint8_t* dst,
                                                                              int64_t n) {
  Body::run(src, dst, n);
}

// The hardware widens fp16 exactly, subnormals included. It quiets NaN, which the step to bf16 does anyway. This
// loop is therefore used for bf16 only: for fp32 the bits would differ from other instruction sets.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void fp16_to_bf16_avx512(const uint8_t* src, uint8_t* dst,
                                                                                       int64_t n) {
  const __m512i half = _mm512_set1_epi32(0x7fff);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i quiet = _mm512_set1_epi32(0x40);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 2 * i)));
    const __m512i bits = _mm512_castps_si512(wide);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i bias = _mm512_add_epi32(half, _mm512_and_si512(high, one));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(wide, wide, _CMP_UNORD_Q);
    const __m512i out = _mm512_mask_or_epi32(rounded, nan, high, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 2 * i), _mm512_cvtepi32_epi16(out));
  }
  Fp16ToBf16::run(src + 2 * i, dst + 2 * i, n - i);
}
#endif

template <typename Body>
Convert pick() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if constexpr (std::is_same_v<Body, Fp16ToBf16>) return fp16_to_bf16_avx512;
    return run_avx512<Body>;
  }
  if (__builtin_cpu_supports("avx2")) return run_avx2<Body>;
#endif
  return run_base<Body>;
}

void copy2(const uint8_t* src, uint8_t* dst, int64_t n) { std::memcpy(dst, src, static_cast<size_t>(n) * 2); }
void copy4(const uint8_t* src, uint8_t* dst, int64_t n) { std::memcpy(dst, src, static_cast<size_t>(n) * 4); }

template <typename T>
void gather(const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; i++) std::memcpy(dst + i * sizeof(T), src + static_cast<uint64_t>(i) * stride, sizeof(T));
}

}  // namespace

Convert converter(DType from, DType to) {
  if (from == to) return size_of(from) == 2 ? copy2 : copy4;
  if (to == DType::kFloat32) return from == DType::kBFloat16 ? pick<Bf16ToFloat>() : pick<Fp16ToFloat>();
  return from == DType::kFloat16 ? pick<Fp16ToBf16>() : pick<FloatToBf16>();
}

void convert_strided(DType from, DType to, const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n) {
  const Convert convert = converter(from, to);
  constexpr int64_t kBlock = 512;
  alignas(64) uint8_t packed[kBlock * 4];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const uint8_t* at = src + static_cast<uint64_t>(i) * stride;
    if (size_of(from) == 2) {
      gather<uint16_t>(at, stride, packed, count);
    } else {
      gather<uint32_t>(at, stride, packed, count);
    }
    convert(packed, dst + static_cast<uint64_t>(i) * size_of(to), count);
  }
}

}  // namespace refit
