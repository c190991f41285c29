// Every kernel set of this machine against double precision, and bit for bit against itself: batch, position, thread
// count, alignment and tails must not change a result.
#include "cpu/kernels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "test/check.h"

using namespace refit;
using refit::cpu::Kernels;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kPoison = -777.25f;

std::mt19937_64 rng(20240607);

std::vector<float> normal(int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(rng);
  return v;
}

std::vector<uint16_t> to_bf16(const std::vector<float>& v) {
  std::vector<uint16_t> out(v.size());
  for (size_t i = 0; i < v.size(); i++) out[i] = float_to_bf16(v[i]);
  return out;
}

bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }
bool same_bits(const float* a, const float* b, int64_t n) { return std::memcmp(a, b, static_cast<size_t>(n) * 4) == 0; }

// Memory that ends at an unreadable page: a read past the end is a crash, in assembler as well.
class Fenced {
 public:
  Fenced(const void* data, size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<uint8_t*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + bytes_ - page, page, PROT_NONE);
    data_ = base_ + bytes_ - page - bytes;
    if (bytes > 0) std::memcpy(data_, data, bytes);
  }
  ~Fenced() { munmap(base_, bytes_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* base_;
  uint8_t* data_;
  size_t bytes_;
};

struct Weights {
  DType dtype;
  int64_t N, K;
  std::vector<float> exact;  // what the stored values are
  std::vector<uint16_t> half;
  std::vector<float> bias;
  std::vector<uint16_t> half_bias;

  Weights(DType t, int64_t n, int64_t k) : dtype(t), N(n), K(k), exact(normal(n * k)), bias(normal(n)) {
    if (t == DType::kBFloat16) {
      for (float& x : exact) x = round_bf16(x);
      for (float& x : bias) x = round_bf16(x);
      half = to_bf16(exact);
      half_bias = to_bf16(bias);
    }
  }
  const void* data() const { return dtype == DType::kBFloat16 ? static_cast<const void*>(half.data()) : exact.data(); }
  size_t bytes() const { return static_cast<size_t>(N * K) * size_of(dtype); }
  const void* bias_data() const {
    return dtype == DType::kBFloat16 ? static_cast<const void*>(half_bias.data()) : bias.data();
  }
};

std::vector<float> inputs(const Weights& w, int64_t M) {
  std::vector<float> x = normal(M * w.K);
  if (w.dtype == DType::kBFloat16) {
    for (float& v : x) v = round_bf16(v);
  }
  return x;
}

const char* name_of(DType t) { return t == DType::kBFloat16 ? "bf16" : "f32"; }

// Values, poison around y, reads within x, w and bias.
void gemm_is_right(const Kernels& k, Pool& pool, DType dtype, int64_t M, int64_t N, int64_t K, bool with_bias) {
  const Weights w(dtype, N, K);
  const int64_t ldx = K + 3, ldy = N + 5;
  const std::vector<float> x = inputs(w, M);
  std::vector<float> strided(static_cast<size_t>((M - 1) * ldx + K), kNan);
  for (int64_t m = 0; m < M; m++) std::copy_n(&x[static_cast<size_t>(m * K)], K, strided.data() + m * ldx);
  Fenced fenced_x(strided.data(), strided.size() * 4);
  Fenced fenced_w(w.data(), w.bytes());
  Fenced fenced_bias(w.bias_data(), static_cast<size_t>(N) * size_of(dtype));
  const std::vector<float> poison(static_cast<size_t>((M - 1) * ldy + N), kPoison);
  Fenced y(poison.data(), poison.size() * 4);
  k.gemm(pool, fenced_x.as<float>(), ldx, fenced_w.as<void>(), dtype, with_bias ? fenced_bias.as<void>() : nullptr,
         y.as<float>(), ldy, M, N, K);
  for (int64_t m = 0; m < M; m++) {
    for (int64_t n = 0; n < N; n++) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < K; i++) {
        const double p =
            static_cast<double>(x[static_cast<size_t>(m * K + i)]) * w.exact[static_cast<size_t>(n * K + i)];
        sum += p;
        magnitude += std::fabs(p);
      }
      const double b = with_bias ? w.bias[static_cast<size_t>(n)] : 0.0;
      // A chain of K roundings grows like a random walk; this is far below one wrong or missing term.
      const double bound = 1.2e-7 * (4 + 2 * std::sqrt(static_cast<double>(K))) *
                               (magnitude / std::sqrt(K + 1.0) + std::fabs(sum) + std::fabs(b)) +
                           1e-6;
      const double got = y.as<float>()[m * ldy + n];
      if (!CHECKF(std::fabs(got - (sum + b)) <= bound, "%s %s M=%ld N=%ld K=%ld [%ld, %ld]: %.9g, not %.9g", k.name,
                  name_of(dtype), long(M), long(N), long(K), long(m), long(n), got, sum + b)) {
        return;
      }
    }
    for (int64_t n = N; n < ldy && m + 1 < M; n++) CHECK(y.as<float>()[m * ldy + n] == kPoison);
  }
}

void gemm_rows_do_not_depend_on_their_batch(const Kernels& k, std::vector<Pool*> pools, DType dtype, int64_t N,
                                            int64_t K) {
  const Weights w(dtype, N, K);
  const int64_t most = 200;
  const std::vector<float> x = inputs(w, most);
  // The reference: every row alone, one thread.
  std::vector<float> alone(static_cast<size_t>(most * N), kPoison);
  for (int64_t m = 0; m < most; m++) {
    k.gemm(*pools[0], x.data() + m * K, K, w.data(), dtype, w.bias_data(), alone.data() + m * N, N, 1, N, K);
  }
  for (Pool* pool : pools) {
    for (int64_t M : {1, 2, 3, 5, 7, 13, 16, 33, 47, 48, 49, 64, 100, 200}) {
      // At the front of x and at its back: another place in the batch for the same row.
      for (int64_t from : {int64_t{0}, most - M}) {
        std::vector<float> y(static_cast<size_t>(M * N), kPoison);
        k.gemm(*pool, x.data() + from * K, K, w.data(), dtype, w.bias_data(), y.data(), N, M, N, K);
        CHECKF(same_bits(y.data(), alone.data() + from * N, M * N), "%s %s threads=%d M=%ld from=%ld N=%ld K=%ld",
               k.name, name_of(dtype), pool->threads(), long(M), long(from), long(N), long(K));
      }
    }
  }
  // A column does not depend on its neighbours: the same rows of w as a smaller matrix.
  for (int64_t n : {int64_t{1}, N / 2, N - 1}) {
    if (n < 1 || n >= N) continue;
    const uint8_t* part = static_cast<const uint8_t*>(w.data()) + n * K * static_cast<int64_t>(size_of(dtype));
    const uint8_t* bias = static_cast<const uint8_t*>(w.bias_data()) + n * static_cast<int64_t>(size_of(dtype));
    std::vector<float> y(static_cast<size_t>(7 * (N - n)));
    k.gemm(*pools.back(), x.data(), K, part, dtype, bias, y.data(), N - n, 7, N - n, K);
    for (int64_t m = 0; m < 7; m++) {
      CHECKF(same_bits(y.data() + m * (N - n), alone.data() + m * N + n, N - n), "%s %s n=%ld", k.name, name_of(dtype),
             long(n));
    }
  }
}

// More rows than one slab, and rows cut into several claims (few columns, many rows).
void gemm_slabs_and_row_claims(const Kernels& k, std::vector<Pool*> pools) {
  const int64_t N = 24, K = 130, M = 1100;
  const Weights w(DType::kBFloat16, N, K);
  const std::vector<float> x = inputs(w, M);
  std::vector<float> alone(static_cast<size_t>(M * N));
  for (int64_t m = 0; m < M; m++) {
    k.gemm(*pools[0], x.data() + m * K, K, w.data(), w.dtype, nullptr, alone.data() + m * N, N, 1, N, K);
  }
  for (Pool* pool : pools) {
    std::vector<float> y(static_cast<size_t>(M * N), kPoison);
    k.gemm(*pool, x.data(), K, w.data(), w.dtype, nullptr, y.data(), N, M, N, K);
    CHECKF(same_bits(y.data(), alone.data(), M * N), "%s threads=%d", k.name, pool->threads());
  }
}

// Both fuse multiply and add in the same four lanes: a machine without AVX-512 computes what one with it does.
void gemm_of_avx2_and_avx512_agree(Pool& pool) {
  const std::vector<std::string> all = cpu::isas();
  if (std::count(all.begin(), all.end(), "avx512") == 0) return;
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (int64_t M : {1, 9, 70}) {
      const Weights w(dtype, 75, 1111);
      const std::vector<float> x = inputs(w, M);
      std::vector<float> a(static_cast<size_t>(M * w.N)), b(a.size());
      cpu::kernels("avx2").gemm(pool, x.data(), w.K, w.data(), dtype, w.bias_data(), a.data(), w.N, M, w.N, w.K);
      cpu::kernels("avx512").gemm(pool, x.data(), w.K, w.data(), dtype, w.bias_data(), b.data(), w.N, M, w.N, w.K);
      CHECKF(same_bits(a.data(), b.data(), M * w.N), "%s M=%ld", name_of(dtype), long(M));
    }
  }
}

// A NaN or infinity reaches exactly the outputs that depend on it.
void gemm_keeps_poison_where_it_belongs(const Kernels& k, Pool& pool, DType dtype) {
  const int64_t M = 9, N = 77, K = 67;
  Weights w(dtype, N, K);
  std::vector<float> x = inputs(w, M);
  std::vector<float> clean(static_cast<size_t>(M * N)), y(clean.size());
  k.gemm(pool, x.data(), K, w.data(), dtype, nullptr, clean.data(), N, M, N, K);
  auto set_w = [&](int64_t n, int64_t i, float v) {
    w.exact[static_cast<size_t>(n * K + i)] = v;
    if (dtype == DType::kBFloat16) w.half[static_cast<size_t>(n * K + i)] = float_to_bf16(v);
  };
  set_w(3, K - 1, kNan);
  set_w(70, 0, kInf);
  x[4 * K + 11] = kNan;
  x[8 * K + 66] = kInf;
  k.gemm(pool, x.data(), K, w.data(), dtype, nullptr, y.data(), N, M, N, K);
  for (int64_t m = 0; m < M; m++) {
    for (int64_t n = 0; n < N; n++) {
      const float got = y[static_cast<size_t>(m * N + n)];
      const bool touched = n == 3 || n == 70 || m == 4 || m == 8;
      if (n == 3 || m == 4) {
        CHECKF(std::isnan(got), "%s %s [%ld, %ld] %g", k.name, name_of(dtype), long(m), long(n),
               static_cast<double>(got));
      } else if (touched) {
        CHECKF(!std::isfinite(got), "%s %s [%ld, %ld] %g", k.name, name_of(dtype), long(m), long(n),
               static_cast<double>(got));
      } else {
        CHECKF(same_bits(got, clean[static_cast<size_t>(m * N + n)]), "%s %s [%ld, %ld]", k.name, name_of(dtype),
               long(m), long(n));
      }
    }
  }
}

void gemm_edges(const Kernels& k, Pool& pool) {
  float y[4] = {kPoison, kPoison, kPoison, kPoison};
  const float x[2] = {1, 2};
  const float bias[2] = {5, 6};
  k.gemm(pool, x, 2, x, DType::kFloat32, nullptr, y, 2, 0, 2, 2);
  k.gemm(pool, x, 2, x, DType::kFloat32, nullptr, y, 2, 2, 0, 2);
  CHECK(y[0] == kPoison && y[3] == kPoison);
  k.gemm(pool, x, 0, x, DType::kFloat32, bias, y, 2, 1, 2, 0);
  CHECK(y[0] == 5 && y[1] == 6 && y[2] == kPoison);
  CHECK_THROWS(k.gemm(pool, x, 2, x, DType::kFloat16, nullptr, y, 2, 1, 1, 2), std::invalid_argument);
}

// Calls from within a task of the same pool (a mixture of experts does that) give the same bits.
void gemm_inside_a_task(const Kernels& k, Pool& pool) {
  const Weights w(DType::kBFloat16, 300, 260);
  const std::vector<float> x = inputs(w, 20);
  std::vector<float> want(20 * 300);
  k.gemm(pool, x.data(), 260, w.data(), w.dtype, nullptr, want.data(), 300, 20, 300, 260);
  std::vector<std::vector<float>> got(6, std::vector<float>(20 * 300));
  pool.parallel_for(6, [&](int64_t i, int) {
    k.gemm(pool, x.data(), 260, w.data(), w.dtype, nullptr, got[static_cast<size_t>(i)].data(), 300, 20, 300, 260);
  });
  for (const auto& y : got) CHECKF(same_bits(y.data(), want.data(), 20 * 300), "%s", k.name);
}

// ---- vector kernels ----

const int64_t kLengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 1000};

// The same input at another alignment, its end at a fence, gives the same bits.
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
    // What lies behind the end counts for nothing; a NaN within always comes through.
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

// map(in, out, n): element i of out must be the bits that a call on that element alone gives, and nothing past n is
// written.
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

// Bit for bit as core/dtype.h: every bf16 value, the ties, denormals, infinities and NaNs around them.
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

void silu(const Kernels& k) {
  std::vector<float> gate;
  for (float g = -120.0f; g < 120.0f; g += 0.0173f) gate.push_back(g);
  for (float g : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e4f, -1e4f, 1e30f, -1e30f, 3.4e38f, -3.4e38f, kInf}) gate.push_back(g);
  const std::vector<float> up(gate.size(), 1.5f);
  std::vector<float> out(gate.size());
  k.silu_mul(gate.data(), up.data(), out.data(), static_cast<int64_t>(gate.size()));
  for (size_t i = 0; i < gate.size(); i++) {
    const double g = gate[i];
    const double want = g < -700 ? 0.0 : g / (1 + std::exp(-g)) * 1.5;
    CHECKF(std::isinf(static_cast<float>(want)) ? out[i] == static_cast<float>(want)
                                                : std::fabs(out[i] - want) <= 8e-7 * std::fabs(want) + 4e-43,
           "%s silu(%.9g) * 1.5 = %.9g, not %.9g", k.name, g, static_cast<double>(out[i]), want);
  }
  float nan_gate[2] = {kNan, 1.0f}, nan_up[2] = {1.0f, kNan}, nan_out[2];
  k.silu_mul(nan_gate, nan_up, nan_out, 2);
  CHECK(std::isnan(nan_out[0]) && std::isnan(nan_out[1]));
  std::shuffle(gate.begin(), gate.end(), rng);
  gate.resize(1000);
  map_is_positionless(k, "silu_mul", gate,
                      [&](const float* p, float* o, int64_t m) { k.silu_mul(p, up.data(), o, m); });
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
  Pool one(1), two(2), three(3);
  gemm_of_avx2_and_avx512_agree(two);
  for (const std::string& isa : cpu::isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    const Kernels& k = cpu::kernels(isa);
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (int64_t N : {1, 5, 16, 63, 64, 65, 131}) {
        for (int64_t K : {1, 2, 3, 31, 32, 33, 64, 255, 256, 257, 515}) {
          gemm_is_right(k, three, dtype, 1, N, K, true);
          gemm_is_right(k, one, dtype, 5, N, K, false);
        }
      }
      for (int64_t M : {2, 6, 7, 12, 13, 48, 49, 61}) gemm_is_right(k, two, dtype, M, 67, 259, M % 2 == 0);
      gemm_is_right(k, three, dtype, 50, 300, 1030, true);
      gemm_is_right(k, two, dtype, 3, 700, 1030, true);
      gemm_rows_do_not_depend_on_their_batch(k, {&one, &two, &three}, dtype, 161, 769);
      gemm_rows_do_not_depend_on_their_batch(k, {&one, &three}, dtype, 64, 64);
      gemm_keeps_poison_where_it_belongs(k, two, dtype);
    }
    gemm_slabs_and_row_claims(k, {&one, &two, &three});
    gemm_inside_a_task(k, three);
    gemm_edges(k, two);
    reductions(k);
    axpy(k);
    conversions(k);
    exponentials(k);
    silu(k);
  }
  return test::finish("kernels_test");
}
