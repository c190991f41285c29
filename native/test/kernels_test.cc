// The vector kernels of every kernel set of this machine: against double precision, and bit for bit against themselves.
// Alignment, position and tails must not change a result.
#include "cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "test/check.h"
#include "test/kernel_values.h"

using namespace refit;
using namespace refit::test;
using refit::cpu::Kernels;

namespace {

const int64_t kLengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 1000};

// The same input gives the same bits at another alignment, with its end at an unreadable page.
template <class T, class Fn>
void at_every_alignment(const Kernels& k, const char* what, const std::vector<T>& x, Fn result) {
  const float want = result(x.data());
  for (size_t shift = 0; shift < 4; shift++) {
    std::vector<T> moved(x.size() + shift);
    std::copy(x.begin(), x.end(), moved.begin() + static_cast<int64_t>(shift));
    CHECKF(same_bits(result(moved.data() + shift), want), "%s %s n=%zu shift=%zu", k.name, what, x.size(), shift);
  }
  Fenced fenced(x.data(), x.size() * sizeof(T));
  CHECKF(same_bits(result(fenced.as<T>()), want), "%s %s n=%zu at the fence", k.name, what, x.size());
}

void reductions(const Kernels& k) {
  for (int64_t n : kLengths) {
    const std::vector<float> a = normal(n), b = normal(n);
    const std::vector<uint16_t> h = to_bf16(b);
    double dot = 0, dot_h = 0, squares = 0, most = 0;
    for (size_t i = 0; i < a.size(); i++) {
      dot += static_cast<double>(a[i]) * b[i];
      dot_h += static_cast<double>(a[i]) * bf16_to_float(h[i]);
      squares += static_cast<double>(a[i]) * a[i];
      most += std::fabs(static_cast<double>(a[i]) * b[i]);
    }
    const double bound = 1e-6 * (most + 1e-3);
    CHECKF(std::fabs(k.dot(a.data(), b.data(), n) - dot) <= bound, "%s n=%ld", k.name, long(n));
    CHECKF(std::fabs(k.dot_bf16(a.data(), h.data(), n) - dot_h) <= bound, "%s n=%ld", k.name, long(n));
    CHECKF(std::fabs(k.sum_squares(a.data(), n) - squares) <= 1e-6 * squares, "%s n=%ld", k.name, long(n));
    at_every_alignment(k, "dot", a, [&](const float* p) { return k.dot(p, b.data(), n); });
    at_every_alignment(k, "dot_bf16", h, [&](const uint16_t* p) { return k.dot_bf16(a.data(), p, n); });
    at_every_alignment(k, "sum_squares", a, [&](const float* p) { return k.sum_squares(p, n); });
    at_every_alignment(k, "max", a, [&](const float* p) { return k.max(p, n); });
    const float max = k.max(a.data(), n);
    CHECKF(max == (n == 0 ? -kInf : *std::max_element(a.begin(), a.end())), "%s n=%ld %g", k.name, long(n),
           static_cast<double>(max));
    // Values after the end do not matter. A NaN before the end always reaches the result.
    for (int64_t at = 0; at < n; at += 1 + n / 9) {
      std::vector<float> bad = a;
      bad[static_cast<size_t>(at)] = kNan;
      CHECKF(std::isnan(k.max(bad.data(), n)) && std::isnan(k.sum_squares(bad.data(), n)) &&
                 std::isnan(k.dot(b.data(), bad.data(), n)),
             "%s n=%ld at=%ld", k.name, long(n), long(at));
      CHECK(!std::isnan(k.max(bad.data(), at)) && !std::isnan(k.dot(bad.data(), b.data(), at)));
      bad[static_cast<size_t>(at)] = kInf;
      CHECK(k.max(bad.data(), n) == kInf);
    }
    const std::vector<float> low(static_cast<size_t>(n), -kInf);
    CHECK(k.max(low.data(), n) == -kInf);
    const std::vector<float> negative(static_cast<size_t>(n), -3.0f);
    if (n > 0) CHECK(k.max(negative.data(), n) == -3.0f);
  }
}

// map(in, out, n): element i of out must have the bits of a call on that element alone, and nothing past n is written.
template <class Map>
void map_is_positionless(const Kernels& k, const char* what, const std::vector<float>& in, Map map) {
  for (int64_t n : kLengths) {
    if (n > static_cast<int64_t>(in.size())) continue;
    Fenced x(in.data(), static_cast<size_t>(n) * 4);
    std::vector<float> out(static_cast<size_t>(n) + 17, kPoison);
    map(x.as<float>(), out.data(), n);
    for (int64_t i = 0; i < n; i++) {
      float one = kPoison;
      map(&in[static_cast<size_t>(i)], &one, 1);
      if (!CHECKF(same_bits(out[static_cast<size_t>(i)], one), "%s %s n=%ld i=%ld x=%g", k.name, what, long(n), long(i),
                  static_cast<double>(in[static_cast<size_t>(i)])))
        break;
    }
    for (size_t i = static_cast<size_t>(n); i < out.size(); i++) CHECK(out[i] == kPoison);
  }
}

void axpy(const Kernels& k) {
  const float s = 0.7310585f;
  for (int64_t n : kLengths) {
    const std::vector<float> x = normal(n), y0 = normal(n);
    const std::vector<uint16_t> h = to_bf16(x);
    std::vector<float> y(y0), yh(y0);
    y.resize(static_cast<size_t>(n) + 17, kPoison);
    yh.resize(static_cast<size_t>(n) + 17, kPoison);
    Fenced fx(x.data(), x.size() * 4), fh(h.data(), h.size() * 2);
    k.axpy(s, fx.as<float>(), y.data(), n);
    k.axpy_bf16(s, fh.as<uint16_t>(), yh.data(), n);
    for (size_t i = 0; i < x.size(); i++) {
      const double want = static_cast<double>(s) * x[i] + y0[i],
                   want_h = static_cast<double>(s) * bf16_to_float(h[i]) + y0[i];
      const double bound = 1.3e-7 * (std::fabs(static_cast<double>(s) * x[i]) + std::fabs(static_cast<double>(y0[i])));
      CHECKF(std::fabs(y[i] - want) <= bound && std::fabs(yh[i] - want_h) <= bound * 1.01, "%s n=%ld i=%zu", k.name,
             long(n), i);
      float one = y0[i], one_h = y0[i];
      k.axpy(s, &x[i], &one, 1);
      k.axpy_bf16(s, &h[i], &one_h, 1);
      CHECKF(same_bits(one, y[i]) && same_bits(one_h, yh[i]), "%s n=%ld i=%zu", k.name, long(n), i);
    }
    for (size_t i = x.size(); i < y.size(); i++) CHECK(y[i] == kPoison && yh[i] == kPoison);
  }
}

// The bits equal those of core/dtype.h for every bf16 value, the ties, denormals, infinities and NaNs around them.
void conversions(const Kernels& k) {
  std::vector<float> in;
  for (uint32_t high = 0; high < 65536; high++) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      in.push_back(std::bit_cast<float>(high << 16 | low));
  }
  in.resize(in.size() - 3);  // a tail
  const int64_t n = static_cast<int64_t>(in.size());
  std::vector<uint16_t> half(in.size() + 9, 0x1234);
  k.to_bf16(in.data(), half.data(), n);
  std::vector<float> rounded(in);
  k.round_bf16(rounded.data(), n);
  std::vector<float> back(in.size());
  k.from_bf16(half.data(), back.data(), n);
  int64_t wrong = 0;
  for (size_t i = 0; i < in.size(); i++) {
    const uint16_t want = float_to_bf16(in[i]);
    wrong += half[i] != want || !same_bits(rounded[i], bf16_to_float(want)) || !same_bits(back[i], bf16_to_float(want));
  }
  CHECKF(wrong == 0, "%s: %ld of %ld", k.name, long(wrong), long(n));
  for (size_t i = in.size(); i < half.size(); i++) CHECK(half[i] == 0x1234);

  const std::vector<float> x = normal(1000);
  map_is_positionless(k, "round_bf16", x, [&](const float* p, float* out, int64_t m) {
    if (m > 0) std::memcpy(out, p, static_cast<size_t>(m) * 4);
    k.round_bf16(out, m);
  });
  for (int64_t m : kLengths) {
    const std::vector<uint16_t> h = to_bf16(x);
    Fenced in_h(h.data(), static_cast<size_t>(m) * 2), out_h(h.data(), static_cast<size_t>(m) * 2);
    std::vector<float> f(static_cast<size_t>(m) + 17, kPoison);
    k.from_bf16(in_h.as<uint16_t>(), f.data(), m);
    std::memset(out_h.as<void>(), 0, static_cast<size_t>(m) * 2);
    k.to_bf16(f.data(), out_h.as<uint16_t>(), m);
    CHECKF(m == 0 || std::memcmp(out_h.as<void>(), h.data(), static_cast<size_t>(m) * 2) == 0, "%s m=%ld", k.name,
           long(m));
    for (size_t i = static_cast<size_t>(m); i < f.size(); i++) CHECK(f[i] == kPoison);
  }
}

void exponentials(const Kernels& k) {
  std::vector<float> in;
  for (float x = -110.0f; x < 90.0f; x += 0.0137f) in.push_back(x);
  for (float x : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e-8f, -kInf, kInf, kNan, -1e30f, 1e30f, -103.97f, -87.3f, -87.4f,
                  88.7f, 88.8f, 3.4e38f, -3.4e38f}) {
    in.push_back(x);
  }
  for (size_t i = 0; i < in.size(); i++) {
    float y = in[i];
    const float sum = k.exp_sum(&y, 0.0f, 1);
    CHECK(same_bits(sum, y) || std::isnan(y));
    const double want = std::exp(static_cast<double>(in[i]));
    const float wantf = static_cast<float>(want);
    if (std::isnan(in[i])) {
      CHECK(std::isnan(y));
    } else if (std::isinf(wantf) || want < 1e-46) {
      CHECKF(y == wantf, "%s exp(%.9g) = %.9g", k.name, static_cast<double>(in[i]), static_cast<double>(y));
    } else {
      CHECKF(std::fabs(y - want) <= 4e-7 * want + 1.5e-45, "%s exp(%.9g) = %.9g, not %.9g", k.name,
             static_cast<double>(in[i]), static_cast<double>(y), want);
    }
  }
  std::vector<float> shuffled(in);
  std::shuffle(shuffled.begin(), shuffled.end(), rng);
  shuffled.resize(1000);
  map_is_positionless(k, "exp", shuffled, [&](const float* p, float* out, int64_t m) {
    if (m > 0) std::memcpy(out, p, static_cast<size_t>(m) * 4);
    k.exp_sum(out, 0.0f, m);
  });
  for (int64_t n : kLengths) {
    const std::vector<float> x = normal(n, 4.0f);
    double want = 0;
    for (float v : x) want += std::exp(static_cast<double>(v) - 3.5);
    std::vector<float> e(x);
    CHECKF(std::fabs(k.exp_sum(e.data(), 3.5f, n) - want) <= 1e-6 * want, "%s n=%ld", k.name, long(n));
    at_every_alignment(k, "exp_sum", x, [&](const float* p) {
      std::vector<float> copy(p, p + n);
      return k.exp_sum(copy.data(), 3.5f, n);
    });
  }
  // A softmax with masked places.
  std::vector<float> masked = {1.0f, -kInf, 0.0f, -kInf, -kInf};
  CHECK(std::fabs(k.exp_sum(masked.data(), 1.0f, 5) - (1.0 + std::exp(-1.0))) < 1e-6);
  CHECK(masked[0] == 1.0f && masked[1] == 0.0f && masked[4] == 0.0f);
}

using ActivateMul = void (*)(const float*, const float*, float*, int64_t);

// `wanted` gives the activation in double, and the bound of its relative error.
template <class Wanted>
void activation(const Kernels& k, const char* name, ActivateMul activate_mul, Wanted wanted) {
  std::vector<float> gate;
  for (float g = -120.0f; g < 120.0f; g += 0.0173f) gate.push_back(g);
  for (float g : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e4f, -1e4f, 1e30f, -1e30f, 3.4e38f, -3.4e38f, kInf}) gate.push_back(g);
  const std::vector<float> up(gate.size(), 1.5f);
  std::vector<float> out(gate.size());
  activate_mul(gate.data(), up.data(), out.data(), static_cast<int64_t>(gate.size()));
  for (size_t i = 0; i < gate.size(); i++) {
    const auto [value, error] = wanted(static_cast<double>(gate[i]));
    const double want = value * 1.5;
    CHECKF(std::isinf(static_cast<float>(want)) ? out[i] == static_cast<float>(want)
                                                : std::fabs(out[i] - want) <= error * std::fabs(want) + 4e-43,
           "%s %s(%.9g) * 1.5 = %.9g, not %.9g", k.name, name, static_cast<double>(gate[i]),
           static_cast<double>(out[i]), want);
  }
  float nan_gate[2] = {kNan, 1.0f}, nan_up[2] = {1.0f, kNan}, nan_out[2];
  activate_mul(nan_gate, nan_up, nan_out, 2);
  CHECK(std::isnan(nan_out[0]) && std::isnan(nan_out[1]));
  std::shuffle(gate.begin(), gate.end(), rng);
  gate.resize(1000);
  map_is_positionless(k, name, gate, [&](const float* p, float* o, int64_t m) { activate_mul(p, up.data(), o, m); });
}

void activations(const Kernels& k) {
  activation(k, "silu", k.silu_mul, [](double g) { return std::pair(g < -700 ? 0.0 : g / (1 + std::exp(-g)), 8e-7); });
  activation(k, "gelu_tanh", k.gelu_tanh_mul, [](double g) {
    const double t = 2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
    // e^t has the error of t, which is |t| times that of a float.
    return std::pair(t < -700 ? 0.0 : g / (1 + std::exp(-t)), 8e-7 + (t < 0 ? -t * 3e-7 : 0.0));
  });
}

void names() {
  const std::vector<std::string> all = cpu::isas();
  CHECK(!all.empty() && all.back() == "scalar");
  CHECK(cpu::kernels("").name == all.front());
  for (const std::string& isa : all) CHECK(cpu::kernels(isa).name == isa);
  CHECK_THROWS(cpu::kernels("sse9"), std::invalid_argument);
}

}  // namespace

int main(int argc, char** argv) {
  names();
  for (const std::string& isa : cpu::isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    const Kernels& k = cpu::kernels(isa);
    reductions(k);
    axpy(k);
    conversions(k);
    exponentials(k);
    activations(k);
  }
  return test::finish("kernels_test");
}
