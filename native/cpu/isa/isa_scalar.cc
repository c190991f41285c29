// The portable set: four lanes of the compiler's own vectors, which become SSE2 or NEON registers, or plain code
// elsewhere. On x86 multiply and add round separately (this unit is compiled with -ffp-contract=off), on arm64 they are
// one fused operation.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>

#include "cpu/gemm/gemm_tile.h"
#include "cpu/isa/kernels_vec.h"

namespace refit::cpu {
namespace {

struct Portable {
  static constexpr int W = 4;
  static constexpr int kAccumulators = 8, kTileRows = 4, kDirectRows = 4, kMaxRows = 4,
                       kMaxDirect = 4;  // see gemm_tile.h, isa.h
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));
  using M = I;

  static inline F zero() { return F{0, 0, 0, 0}; }
  static inline F set1(float x) { return F{x, x, x, x}; }
  static inline F load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, 16);
    return x;
  }
  static inline F loadn(const float* p, int n) {
    F x = zero();
    __builtin_memcpy(&x, p, static_cast<std::size_t>(n) * 4);
    return x;
  }
  static inline void store(float* p, F x) { __builtin_memcpy(p, &x, 16); }
  static inline void storen(float* p, F x, int n) { __builtin_memcpy(p, &x, static_cast<std::size_t>(n) * 4); }
  static inline F load_bf16(const uint16_t* p) {
    return floats(I{static_cast<int32_t>(static_cast<uint32_t>(p[0]) << 16),
                    static_cast<int32_t>(static_cast<uint32_t>(p[1]) << 16),
                    static_cast<int32_t>(static_cast<uint32_t>(p[2]) << 16),
                    static_cast<int32_t>(static_cast<uint32_t>(p[3]) << 16)});
  }
  static inline F loadn_bf16(const uint16_t* p, int n) {
    uint16_t full[4] = {};
    __builtin_memcpy(full, p, static_cast<std::size_t>(n) * 2);
    return load_bf16(full);
  }
  static inline void store_low16(uint16_t* p, I x) {
    for (int i = 0; i < W; i++) p[i] = static_cast<uint16_t>(x[i]);
  }
  static inline void storen_low16(uint16_t* p, I x, int n) {
    for (int i = 0; i < n; i++) p[i] = static_cast<uint16_t>(x[i]);
  }
  static inline F add(F a, F b) { return a + b; }
  static inline F sub(F a, F b) { return a - b; }
  static inline F mul(F a, F b) { return a * b; }
  static inline F div(F a, F b) { return a / b; }
  static inline F fma(F a, F b, F c) {
#if defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
  }
  // As x86 has it: the second operand where either is NaN.
  static inline F max(F a, F b) { return floats(select(a > b, bits(a), bits(b))); }
  static inline F min(F a, F b) { return floats(select(a < b, bits(a), bits(b))); }
  static inline I nan_mask(F x) { return x != x; }
  static inline I bits(F x) { return reinterpret_cast<I>(x); }
  static inline F floats(I x) { return reinterpret_cast<F>(x); }
  static inline I iset1(int x) { return I{x, x, x, x}; }
  // Unsigned: wrapping is meant.
  static inline I iadd(I a, I b) { return reinterpret_cast<I>(reinterpret_cast<U>(a) + reinterpret_cast<U>(b)); }
  static inline I isub(I a, I b) { return reinterpret_cast<I>(reinterpret_cast<U>(a) - reinterpret_cast<U>(b)); }
  static inline I iand(I a, I b) { return a & b; }
  static inline I ior(I a, I b) { return a | b; }
  static inline M igt(I a, I b) { return a > b; }
  static inline I select(M m, I yes, I no) { return (m & yes) | (~m & no); }
  template <int N>
  static inline I shl(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) << N);
  }
  template <int N>
  static inline I shr(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) >> N);
  }
  static inline I sar1(I x) { return x >> 1; }

  static inline I load_words(const void* p) {
    I x;
    __builtin_memcpy(&x, p, 16);
    return x;
  }
  static inline I load_words(const void* p, int bytes) {
    I x = iset1(0);
    __builtin_memcpy(&x, p, static_cast<std::size_t>(bytes));
    return x;
  }
  static inline void store_words(void* p, I x) { __builtin_memcpy(p, &x, 16); }
  static inline I broadcast(const uint32_t* p) { return load_words(p); }
  static inline void transpose(I*) {}
  static inline F sum_chunks(F a, F b, F c, F d) {
    return F{(a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]), (c[0] + c[1]) + (c[2] + c[3]),
             (d[0] + d[1]) + (d[2] + d[3])};
  }
};

}  // namespace

constinit const VectorOps kVectorScalar = vector_ops<Portable>();
constinit const GemmOps kGemmScalarBf16 =
    Gemm<Portable, FloatArith<Portable>, LoadWiden<Portable>, 2>::ops(convert_floats);
constinit const GemmOps kGemmScalarF32 =
    Gemm<Portable, FloatArith<Portable>, LoadWords<Portable>, 4>::ops(convert_floats);

}  // namespace refit::cpu
