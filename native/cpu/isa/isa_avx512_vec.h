// The AVX-512 vector type (F, BW, DQ, VL) for kernels_vec.h and gemm_tile.h. Internal linkage: see isa.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace refit::cpu {
namespace {

struct Avx512 {
  static constexpr int W = 16;
  static constexpr int kAccumulators = 24, kTileRows = 6, kDirectRows = 8, kMaxRows = 8,
                       kMaxDirect = 48;  // see gemm_tile.h, isa.h
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;

  static inline M first(int n) { return static_cast<M>((1u << n) - 1); }
  static inline F zero() { return _mm512_setzero_ps(); }
  static inline F set1(float x) { return _mm512_set1_ps(x); }
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline F loadn(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static inline void storen(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static inline F load_bf16(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline F loadn_bf16(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static inline F widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
  static inline void store_low16(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static inline void storen_low16(uint16_t* p, I x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(x));
  }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
  static inline I nan_mask(F x) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)); }
  static inline I bits(F x) { return _mm512_castps_si512(x); }
  static inline F floats(I x) { return _mm512_castsi512_ps(x); }
  static inline I iset1(int x) { return _mm512_set1_epi32(x); }
  static inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static inline I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static inline M igt(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static inline I select(M m, I yes, I no) { return _mm512_mask_mov_epi32(no, m, yes); }
  template <int N>
  static inline I shl(I x) {
    return _mm512_slli_epi32(x, N);
  }
  template <int N>
  static inline I shr(I x) {
    return _mm512_srli_epi32(x, N);
  }
  static inline I sar1(I x) { return _mm512_srai_epi32(x, 1); }

  static inline I load_words(const void* p) { return _mm512_loadu_si512(p); }
  static inline I load_words(const void* p, int bytes) {
    return _mm512_maskz_loadu_epi8(bytes >= 64 ? ~0ull : (1ull << bytes) - 1, p);
  }
  static inline void store_words(void* p, I x) { _mm512_storeu_si512(p, x); }
  static inline I broadcast(const uint32_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void transpose(I* t) {
    const I ab_02 = _mm512_shuffle_i32x4(t[0], t[1], 0x88), ab_13 = _mm512_shuffle_i32x4(t[0], t[1], 0xdd);
    const I cd_02 = _mm512_shuffle_i32x4(t[2], t[3], 0x88), cd_13 = _mm512_shuffle_i32x4(t[2], t[3], 0xdd);
    t[0] = _mm512_shuffle_i32x4(ab_02, cd_02, 0x88);
    t[1] = _mm512_shuffle_i32x4(ab_13, cd_13, 0x88);
    t[2] = _mm512_shuffle_i32x4(ab_02, cd_02, 0xdd);
    t[3] = _mm512_shuffle_i32x4(ab_13, cd_13, 0xdd);
  }
  static inline F sum_chunks(F a, F b, F c, F d) {
    const F ab = add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));  // a0+a1 a2+a3 b0+b1 b2+b3
    const F cd = add(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xdd));
    return add(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
  }
};

}  // namespace
}  // namespace refit::cpu
