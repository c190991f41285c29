// Matrix products of every kernel set of this machine: against double precision, and bit for bit against themselves.
// Batch, position and thread count must not change a result.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "test/check.h"
#include "test/kernel_values.h"

using namespace refit;
using namespace refit::test;
using refit::cpu::Kernels;

namespace {

struct Weights {
  DType dtype;
  int64_t N, K;
  std::vector<float> exact;  // the stored values
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

// Checks the values, the poison around y, and that only x, w and bias are read.
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
      // At the front and at the back of x: the same row at another place in the batch.
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

// Both fuse multiply and add in the same four lanes, so machines with and without AVX-512 compute the same bits.
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
}

// Weights in fp16 give the product of the same weights in fp32.
void gemm_widens_fp16(const Kernels& k, Pool& pool) {
  const Weights w(DType::kFloat32, 67, 259);
  std::vector<uint16_t> half, half_bias;
  std::vector<float> wide, wide_bias;
  for (const float f : w.exact) half.push_back(static_cast<uint16_t>(from_float(DType::kFloat16, f)));
  for (const float f : w.bias) half_bias.push_back(static_cast<uint16_t>(from_float(DType::kFloat16, f)));
  for (const uint16_t h : half) wide.push_back(to_float(DType::kFloat16, h));
  for (const uint16_t h : half_bias) wide_bias.push_back(to_float(DType::kFloat16, h));
  const std::vector<float> x = inputs(w, 5);
  std::vector<float> got(5 * 67), want(5 * 67);
  k.gemm(pool, x.data(), 259, half.data(), DType::kFloat16, half_bias.data(), got.data(), 67, 5, 67, 259);
  k.gemm(pool, x.data(), 259, wide.data(), DType::kFloat32, wide_bias.data(), want.data(), 67, 5, 67, 259);
  CHECKF(same_bits(got.data(), want.data(), 5 * 67), "%s", k.name);
  k.gemm(pool, x.data(), 259, half.data(), DType::kFloat16, nullptr, got.data(), 67, 5, 67, 259);
  k.gemm(pool, x.data(), 259, wide.data(), DType::kFloat32, nullptr, want.data(), 67, 5, 67, 259);
  CHECKF(same_bits(got.data(), want.data(), 5 * 67), "%s, without bias", k.name);
}

// Calls from a task of the same pool, as in a mixture of experts, give the same bits.
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

}  // namespace

int main(int argc, char** argv) {
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
    gemm_widens_fp16(k, two);
  }
  return test::finish("kernels_gemm_test");
}
