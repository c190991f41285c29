#include <immintrin.h>

#include "cpu/gemm/gemm_tile.h"
#include "cpu/isa/kernels_vec.h"

namespace refit::cpu {
namespace {

struct Avx2 {
  static constexpr int W = 8;
  static constexpr int kAccumulators = 12, kTileRows = 6, kDirectRows = 4, kMaxRows = 6,
                       kMaxDirect = 8;  // see gemm_tile.h, isa.h
  using F = __m256;
  using I = __m256i;
  using M = __m256i;

  static inline I first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static inline F zero() { return _mm256_setzero_ps(); }
  static inline F set1(float x) { return _mm256_set1_ps(x); }
  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline F loadn(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static inline void storen(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  static inline F load_bf16(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline F loadn_bf16(const uint16_t* p, int n) {
    uint16_t full[8] = {};
    __builtin_memcpy(full, p, static_cast<std::size_t>(n) * 2);
    return load_bf16(full);
  }
  static inline F widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
  static inline void store_low16(uint16_t* p, I x) {
    // Each value is below 2^16, so packing with unsigned saturation keeps it. The lanes are then joined.
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static inline void storen_low16(uint16_t* p, I x, int n) {
    uint16_t full[8];
    store_low16(full, x);
    __builtin_memcpy(p, full, static_cast<std::size_t>(n) * 2);
  }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
  static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
  static inline I nan_mask(F x) { return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  static inline I bits(F x) { return _mm256_castps_si256(x); }
  static inline F floats(I x) { return _mm256_castsi256_ps(x); }
  static inline I iset1(int x) { return _mm256_set1_epi32(x); }
  static inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static inline I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static inline I ior(I a, I b) { return _mm256_or_si256(a, b); }
  static inline M igt(I a, I b) { return _mm256_cmpgt_epi32(a, b); }
  static inline I select(M m, I yes, I no) { return _mm256_blendv_epi8(no, yes, m); }
  template <int N>
  static inline I shl(I x) {
    return _mm256_slli_epi32(x, N);
  }
  template <int N>
  static inline I shr(I x) {
    return _mm256_srli_epi32(x, N);
  }
  static inline I sar1(I x) { return _mm256_srai_epi32(x, 1); }

  static inline I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static inline I load_words(const void* p, int bytes) {
    alignas(32) uint8_t full[32] = {};
    __builtin_memcpy(full, p, static_cast<std::size_t>(bytes));
    return load_words(full);
  }
  static inline void store_words(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static inline I broadcast(const uint32_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void transpose(I* t) {
    const I first = _mm256_permute2x128_si256(t[0], t[1], 0x20);
    t[1] = _mm256_permute2x128_si256(t[0], t[1], 0x31);
    t[0] = first;
  }
  static inline F sum_chunks(F a, F b, F c, F d) {
    const F ab = add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));  // a0+a1 a2+a3 b0+b1 b2+b3
    const F cd = add(_mm256_shuffle_ps(c, d, 0x88), _mm256_shuffle_ps(c, d, 0xdd));
    return add(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
  }
};

}  // namespace

constinit const VectorOps kVectorAvx2 = vector_ops<Avx2>();
constinit const GemmOps kGemmAvx2Bf16 = Gemm<Avx2, FloatArith<Avx2>, LoadWiden<Avx2>, 2>::ops(convert_floats);
constinit const GemmOps kGemmAvx2F32 = Gemm<Avx2, FloatArith<Avx2>, LoadWords<Avx2>, 4>::ops(convert_floats);

}  // namespace refit::cpu
