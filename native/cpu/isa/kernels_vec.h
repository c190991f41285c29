// The vector kernels, written once over a vector type V (isa_*.cc). In an unnamed namespace on purpose: see isa.h.
//
// V: W lanes; F floats, I 32-bit integers, M masks; load/store and their `n` forms, which touch only the first n < W
// elements and read the others as zero.
//
// Element i of a reduction belongs to lane i % (4 W) at any alignment. The lanes are added pairwise in a fixed tree. A
// tail goes through the same operations as a full vector, so the bits of a value do not depend on its position.
#pragma once
#include <cstdint>

#include "cpu/isa/isa.h"

namespace refit::cpu {
namespace {

template <class V>
float sum_lanes(typename V::F a, typename V::F b, typename V::F c, typename V::F d) {
  alignas(64) float lane[V::W];
  V::store(lane, V::add(V::add(a, b), V::add(c, d)));
  for (int half = V::W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  }
  return lane[0];
}

// Calls full(i, u) for every whole vector and part(i, u, n) for the rest; u is the accumulator's number.
template <class V, class Full, class Part>
inline void walk(int64_t n, Full full, Part part) {
  constexpr int W = V::W;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    full(i, 0);
    full(i + W, 1);
    full(i + 2 * W, 2);
    full(i + 3 * W, 3);
  }
  int u = 0;
  for (; i + W <= n; i += W) full(i, u++);
  if (i < n) part(i, u, static_cast<int>(n - i));
}

template <class V>
float dot(const float* a, const float* b, int64_t n) {
  typename V::F acc[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
  walk<V>(
      n, [&](int64_t i, int u) { acc[u] = V::fma(V::load(a + i), V::load(b + i), acc[u]); },
      [&](int64_t i, int u, int m) { acc[u] = V::fma(V::loadn(a + i, m), V::loadn(b + i, m), acc[u]); });
  return sum_lanes<V>(acc[0], acc[1], acc[2], acc[3]);
}

template <class V>
float dot_bf16(const float* a, const uint16_t* b, int64_t n) {
  typename V::F acc[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
  walk<V>(
      n, [&](int64_t i, int u) { acc[u] = V::fma(V::load(a + i), V::load_bf16(b + i), acc[u]); },
      [&](int64_t i, int u, int m) { acc[u] = V::fma(V::loadn(a + i, m), V::loadn_bf16(b + i, m), acc[u]); });
  return sum_lanes<V>(acc[0], acc[1], acc[2], acc[3]);
}

template <class V>
float sum_squares(const float* x, int64_t n) {
  return dot<V>(x, x, n);
}

template <class V>
void axpy(float s, const float* x, float* y, int64_t n) {
  const typename V::F vs = V::set1(s);
  walk<V>(
      n, [&](int64_t i, int) { V::store(y + i, V::fma(vs, V::load(x + i), V::load(y + i))); },
      [&](int64_t i, int, int m) { V::storen(y + i, V::fma(vs, V::loadn(x + i, m), V::loadn(y + i, m)), m); });
}

template <class V>
void axpy_bf16(float s, const uint16_t* x, float* y, int64_t n) {
  const typename V::F vs = V::set1(s);
  walk<V>(
      n, [&](int64_t i, int) { V::store(y + i, V::fma(vs, V::load_bf16(x + i), V::load(y + i))); },
      [&](int64_t i, int, int m) { V::storen(y + i, V::fma(vs, V::loadn_bf16(x + i, m), V::loadn(y + i, m)), m); });
}

// float_to_bf16 of core/dtype.h in every lane; the result in the low 16 bits.
template <class V>
inline typename V::I bf16_bits(typename V::F x) {
  using I = typename V::I;
  const I u = V::bits(x);
  const I high = V::template shr<16>(u);
  const I rounded = V::template shr<16>(V::iadd(V::iadd(u, V::iset1(0x7fff)), V::iand(high, V::iset1(1))));
  const auto nan = V::igt(V::iand(u, V::iset1(0x7fffffff)), V::iset1(0x7f800000));
  return V::select(nan, V::ior(high, V::iset1(0x40)), rounded);
}

template <class V>
inline typename V::F rounded_bf16(typename V::F x) {
  return V::floats(V::template shl<16>(bf16_bits<V>(x)));
}

template <class V>
void round_bf16(float* x, int64_t n) {
  walk<V>(
      n, [&](int64_t i, int) { V::store(x + i, rounded_bf16<V>(V::load(x + i))); },
      [&](int64_t i, int, int m) { V::storen(x + i, rounded_bf16<V>(V::loadn(x + i, m)), m); });
}

template <class V>
void to_bf16(const float* x, uint16_t* y, int64_t n) {
  walk<V>(
      n, [&](int64_t i, int) { V::store_low16(y + i, bf16_bits<V>(V::load(x + i))); },
      [&](int64_t i, int, int m) { V::storen_low16(y + i, bf16_bits<V>(V::loadn(x + i, m)), m); });
}

template <class V>
void from_bf16(const uint16_t* x, float* y, int64_t n) {
  walk<V>(
      n, [&](int64_t i, int) { V::store(y + i, V::load_bf16(x + i)); },
      [&](int64_t i, int, int m) { V::storen(y + i, V::loadn_bf16(x + i, m), m); });
}

// exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2: ln 2 in two parts (Cody and Waite), e^r by its Taylor
// polynomial to r^7, whose first omitted term is below 6e-9. Within 2 ulp for normal results; 0 for -inf, NaN for NaN.
template <class V>
inline typename V::F vexp(typename V::F x) {
  using F = typename V::F;
  using I = typename V::I;
  // Past these bounds the result is 0 or infinity anyway. The order of the operands keeps a NaN.
  x = V::max(V::set1(-110.0f), V::min(V::set1(89.0f), x));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
  const F magic = V::set1(12582912.0f);
  const F shifted = V::add(V::mul(x, V::set1(1.44269504088896341f)), magic);
  const F n = V::sub(shifted, magic);
  F r = V::fma(n, V::set1(-0.693359375f), x);  // 10 bits: exact
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.0f / 5040);
  p = V::fma(p, r, V::set1(1.0f / 720));
  p = V::fma(p, r, V::set1(1.0f / 120));
  p = V::fma(p, r, V::set1(1.0f / 24));
  p = V::fma(p, r, V::set1(1.0f / 6));
  p = V::fma(p, r, V::set1(0.5f));
  p = V::fma(p, r, V::set1(1.0f));
  p = V::fma(p, r, V::set1(1.0f));
  // 2^n in two factors: n is in [-159, 128], which is more than the range of one exponent field.
  const I in = V::isub(V::bits(shifted), V::iset1(0x4b400000));
  const I half = V::sar1(in);
  const I rest = V::isub(in, half);
  const F s1 = V::floats(V::template shl<23>(V::iadd(half, V::iset1(127))));
  const F s2 = V::floats(V::template shl<23>(V::iadd(rest, V::iset1(127))));
  return V::mul(V::mul(p, s1), s2);
}

// g * sigmoid(t) for t of g's sign: g / (1 + e^-t); for g < 0 as g * e^t / (1 + e^t), which cannot overflow.
template <class V>
inline typename V::F times_sigmoid(typename V::F g, typename V::F t) {
  using F = typename V::F;
  const F magnitude = V::floats(V::iand(V::bits(t), V::iset1(0x7fffffff)));
  const F e = vexp<V>(V::sub(V::zero(), magnitude));
  const F positive = V::div(g, V::add(V::set1(1.0f), e));
  const auto negative = V::igt(V::iset1(0), V::bits(g));
  return V::floats(V::select(negative, V::bits(V::mul(positive, e)), V::bits(positive)));
}

struct Silu {
  template <class V>
  static inline typename V::F of(typename V::F g) {
    return times_sigmoid<V>(g, g);
  }
};

// g / 2 * (1 + tanh(t / 2)) = g * sigmoid(t) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh {
  template <class V>
  static inline typename V::F of(typename V::F g) {
    const typename V::F slope = V::fma(V::mul(g, g), V::set1(0.0713548162726f), V::set1(1.59576912160573f));
    return times_sigmoid<V>(g, V::mul(g, slope));
  }
};

template <class V, class Activation>
void activate_mul(const float* gate, const float* up, float* out, int64_t n) {
  walk<V>(
      n,
      [&](int64_t i, int) {
        V::store(out + i, V::mul(Activation::template of<V>(V::load(gate + i)), V::load(up + i)));
      },
      [&](int64_t i, int, int m) {
        V::storen(out + i, V::mul(Activation::template of<V>(V::loadn(gate + i, m)), V::loadn(up + i, m)), m);
      });
}

template <class V>
float exp_sum(float* x, float max, int64_t n) {
  using F = typename V::F;
  const F vmax = V::set1(max);
  F acc[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
  walk<V>(
      n,
      [&](int64_t i, int u) {
        const F e = vexp<V>(V::sub(V::load(x + i), vmax));
        V::store(x + i, e);
        acc[u] = V::add(acc[u], e);
      },
      [&](int64_t i, int u, int m) {
        V::storen(x + i, vexp<V>(V::sub(V::loadn(x + i, m), vmax)), m);
        acc[u] = V::add(acc[u], V::loadn(x + i, m));
      });
  return sum_lanes<V>(acc[0], acc[1], acc[2], acc[3]);
}

// The maximum; NaN if any element is NaN, so a row with a NaN is noticed. -infinity for n = 0.
template <class V>
float max_of(const float* x, int64_t n) {
  using F = typename V::F;
  if (n <= 0) return -__builtin_inff();
  // Starting from x[0] and reading x[0] past the end of a tail does not change the maximum.
  F best[4] = {V::set1(x[0]), V::set1(x[0]), V::set1(x[0]), V::set1(x[0])};
  typename V::I bad = V::iset1(0);
  walk<V>(
      n,
      [&](int64_t i, int u) {
        const F v = V::load(x + i);
        best[u] = V::max(v, best[u]);
        bad = V::ior(bad, V::nan_mask(v));
      },
      [&](int64_t i, int u, int m) {
        alignas(64) float tail[V::W];
        for (int j = 0; j < V::W; j++) tail[j] = j < m ? x[i + j] : x[0];
        const F v = V::load(tail);
        best[u] = V::max(v, best[u]);
        bad = V::ior(bad, V::nan_mask(v));
      });
  alignas(64) float lane[V::W], is_nan[V::W];
  V::store(lane, V::max(V::max(best[0], best[1]), V::max(best[2], best[3])));
  V::store(is_nan, V::floats(bad));
  float result = lane[0];
  for (int j = 0; j < V::W; j++) {
    if (lane[j] > result) result = lane[j];
  }
  for (int j = 0; j < V::W; j++) {
    if (is_nan[j] != 0.0f) return __builtin_nanf("");
  }
  return result;
}

template <class V>
constexpr VectorOps vector_ops() {
  return {dot<V>,        dot_bf16<V>, axpy<V>,      axpy_bf16<V>,          sum_squares<V>,
          round_bf16<V>, to_bf16<V>,  from_bf16<V>, activate_mul<V, Silu>, activate_mul<V, GeluTanh>,
          exp_sum<V>,    max_of<V>};
}

}  // namespace
}  // namespace refit::cpu
