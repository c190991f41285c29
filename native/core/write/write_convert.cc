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

// The loops, which are compiled once per instruction set below.
template <DType kFrom, DType kTo>
struct Conversion {
  static inline __attribute__((always_inline)) void run(const uint8_t* src, uint8_t* dst, int64_t n) {
    auto* const out = reinterpret_cast<Bits<kTo>*>(dst);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = float_bits<kFrom>(load<Bits<kFrom>>(src, i));
      out[i] = static_cast<Bits<kTo>>(element_from_float_bits<kTo>(bits));
    }
  }
};
using Fp16ToBf16 = Conversion<DType::kFloat16, DType::kBFloat16>;

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

template <DType kType>
void copy(const uint8_t* src, uint8_t* dst, int64_t n) {
  std::memcpy(dst, src, static_cast<size_t>(n) * size_of(kType));
}

template <typename T>
void gather(const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; i++) std::memcpy(dst + i * sizeof(T), src + static_cast<uint64_t>(i) * stride, sizeof(T));
}

}  // namespace

Convert converter(DType from, DType to) {
  Convert found = nullptr;
  with_dtype(from, [&]<DType kFrom>() {
    with_dtype(to, [&]<DType kTo>() {
      if constexpr (kFrom == kTo) {
        found = copy<kFrom>;
      } else {
        found = pick<Conversion<kFrom, kTo>>();
      }
    });
  });
  return found;
}

void convert_strided(DType from, DType to, const uint8_t* src, uint64_t stride, uint8_t* dst, int64_t n) {
  const Convert convert = converter(from, to);
  constexpr int64_t kBlock = 512;
  alignas(64) uint8_t packed[kBlock * 4];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const uint8_t* at = src + static_cast<uint64_t>(i) * stride;
    with_dtype(from, [&]<DType kFrom>() { gather<Bits<kFrom>>(at, stride, packed, count); });
    convert(packed, dst + static_cast<uint64_t>(i) * size_of(to), count);
  }
}

}  // namespace refit
