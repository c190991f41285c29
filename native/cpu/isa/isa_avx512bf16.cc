#include "cpu/gemm/gemm_tile.h"
#include "cpu/isa/isa_avx512_vec.h"

namespace refit::cpu {
namespace {

// A word is a pair of bf16. vdpbf16ps adds both products to the fp32 lane; it takes denormals for zero and rounds in
// its own way, the same for every tile shape.
struct PairArith {
  static constexpr int kPerWord = 2;
  static inline __m512bh words(__m512i x) { return reinterpret_cast<__m512bh>(x); }
  static inline __m512 step(__m512 acc, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(acc, a, b); }
};

void convert_pairs(const float* x, int64_t K, uint32_t* words, int64_t stride) {
  for (int64_t k = 0; k < K; k += 8, words += stride) {
    const __m256 v = _mm256_maskz_loadu_ps(static_cast<__mmask8>(K - k < 8 ? (1u << (K - k)) - 1 : 0xff), x + k);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words), reinterpret_cast<__m128i>(_mm256_cvtneps_pbh(v)));
  }
}

}  // namespace

constinit const GemmOps kGemmAvx512Dp = Gemm<Avx512, PairArith, LoadWords<Avx512>, 2>::ops(convert_pairs);

}  // namespace refit::cpu
