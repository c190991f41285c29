// Products with SumOrder::kAscending: an element's bits depend on its rows of x and w alone.
#pragma once
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "cuda/gemm/gemm.h"
#include "cuda/gemm/gemm_order.h"
#include "test/gpu/gemm_loading.cuh"

namespace refit::test {
namespace {

// The sample of gemm_order.h is all rounding errors, so the kernel whose warps divide k has other bits almost
// everywhere.
void test_sample_shows_the_order() {
  const int64_t m = 8, n = 512, k = 4096;
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace);
  Buffer<Element> x(m * k), w(n * k), tile(m * n), stream(m * n);
  // As OrderSample scales them.
  constexpr float kScale = cuda::of_element(1.0f, 32.0f);
  cuda::fill_sample(x.data(), m, k, k, kScale, false, nullptr);
  cuda::fill_sample(w.data(), n, k, k, kScale, true, nullptr);
  const auto run = [&](cuda::GemmPath path, Buffer<Element>& y) {
    gemm.force(path);
    gemm.run({{m, n, k, k, n}, x.data(), w.data(), nullptr, y.data()}, nullptr);
    synchronize("a sample");
    CHECK(gemm.last_path() == path);
    return y.get();
  };
  const auto a = run(cuda::GemmPath::kTile, tile), b = run(cuda::GemmPath::kStream, stream);
  size_t differ = 0, zeros = 0;
  float most = 0;
  for (size_t i = 0; i < a.size(); i++) {
    differ += std::memcmp(&a[i], &b[i], sizeof a[i]) != 0;
    zeros += to_float(a[i]) == 0;
    most = std::max(most, std::fabs(to_float(a[i])));
  }
  CHECKF(differ > a.size() * 9 / 10, "%zu of %zu elements differ", differ, a.size());
  CHECKF(zeros < a.size() / 10, "%zu of %zu sums are 0", zeros, a.size());
  CHECKF(most < 1e-2 * kScale * kScale, "a sum is %g", most);
}

template <class Out>
void test_rows_alone(Gemm& gemm, int64_t n, int64_t k, bool with_bias, uint64_t seed, long& library, long& all,
                     std::pair<double, long> (&loads)[2]) {
  const int64_t most = 2100, ldx = k + 8, ldy = n + 16;
  Buffer<Element> x(most * ldx), w(n * k), bias(n);
  Buffer<Out> y(most * ldy);
  const Element* b = with_bias ? bias.data() : nullptr;
  const auto product = [&](int64_t m, int64_t first) {
    return Product({m, n, k, ldx, ldy}, x.data() + first * ldx, w.data(), b, y.data());
  };
  const std::vector<int64_t> rows = {1, 2, 3, 8, 16, 17, 24, 40, 64, 100, 128, 200, 256, 333, 512, 1024, 2048, most};
  for (const int64_t m : rows) {
    const auto began = std::chrono::steady_clock::now();
    gemm.load(product(m, most - m), nullptr);
    synchronize("load");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    loads[m > 512].first += took.count(), loads[m > 512].second++;
  }
  fill(x.data(), most, k, ldx, 1.0f, seed);
  fill(w.data(), n, k, k, 1.0f, seed + 1);
  fill(bias.data(), 1, n, n, 8.0f, seed + 2);
  std::vector<Out> whole;
  for (auto m = rows.rbegin(); m != rows.rend(); ++m) {
    const int64_t first = most - *m;  // the last rows
    y.poison();
    gemm.run(product(*m, first), nullptr);
    synchronize("a product");
    library += gemm.last_path() == cuda::GemmPath::kLibrary, all++;
    const std::vector<Out> got = y.get();
    if (whole.empty()) whole = got;
    long wrong = 0;
    for (int64_t r = 0; r < *m; r++) {
      wrong += std::memcmp(&got[r * ldy], &whole[(first + r) * ldy], n * sizeof(Out)) != 0;
    }
    CHECKF(wrong == 0, "n=%lld k=%lld%s%s: %ld of %lld rows have other bits than beside all rows",
           static_cast<long long>(n), static_cast<long long>(k), sizeof(Out) == 4 ? " float" : "",
           with_bias ? " bias" : "", wrong, static_cast<long long>(*m));
    y.check_guards("y", "a product in order");
  }
}

void test_order(uint64_t seed) {
  test_sample_shows_the_order();
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace, cuda::SumOrder::kAscending);
  long library = 0, all = 0;
  std::pair<double, long> loads[2] = {};  // milliseconds, number; of up to 512 rows, and of more
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{6144, 4096},
                             {4096, 12288},
                             {2048, 4096},
                             {128, 2048},
                             {1536, 8960},
                             {896, 4864},
                             {72, 64},
                             {1000, 1032}}) {
    test_rows_alone<Element>(gemm, n, k, false, seed, library, all, loads);
    if (n % 8 == 0 && k < 8192) test_rows_alone<Element>(gemm, n, k, true, seed + 10, library, all, loads);
    if (k < 8192) test_rows_alone<float>(gemm, n, k, false, seed + 20, library, all, loads);
  }
  std::printf("ascending sums: %ld of %ld products by the library; %.2f ms a load up to 512 rows, %.2f ms above\n",
              library, all, loads[0].first / loads[0].second, loads[1].first / loads[1].second);
  CHECK(!gemm.has_library() || library > all / 2);
}

}  // namespace
}  // namespace refit::test
