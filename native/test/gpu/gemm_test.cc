// gemm_test [--quick] [--bench] [--seed N]: y = x w^T by each of the three paths against double, and their speed.
#include "cuda/gemm/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "test/gpu/gemm_loading.cuh"
#include "test/gpu/gemm_order.cuh"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {
namespace {

using cuda::GemmPath;

const char* name(GemmPath path) {
  switch (path) {
    case GemmPath::kStream:
      return "stream";
    case GemmPath::kLibrary:
      return "library";
    case GemmPath::kTile:
      return "tile";
    default:
      return "auto";
  }
}

struct Bench {
  Buffer<uint8_t> workspace{kWorkspace};
  Gemm gemm{workspace.data(), kWorkspace};
  bool has_library = gemm.has_library();
  long refused = 0;  // products that the library could have taken but refused
};

struct Case {
  int64_t m, n, k;
  int64_t pad_x = 0, pad_y = 0;                   // ldx - k, ldy - n
  int64_t shift_x = 0, shift_w = 0, shift_y = 0;  // elements past an aligned address
  bool bias = false, wide = false;

  std::string text(GemmPath path) const {
    char s[200];
    std::snprintf(s, sizeof s, "%s m=%lld n=%lld k=%lld ldx=k+%lld ldy=n+%lld shift x %lld w %lld y %lld%s %s",
                  name(path), static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
                  static_cast<long long>(pad_x), static_cast<long long>(pad_y), static_cast<long long>(shift_x),
                  static_cast<long long>(shift_w), static_cast<long long>(shift_y), bias ? " bias" : "",
                  wide ? "float" : name_of(cuda::kElementType));
    return s;
  }
};

float value(Element v) { return to_float(v); }
float value(float v) { return v; }
bool is_poison(Element v) {
  uint16_t bits;
  std::memcpy(&bits, &v, 2);
  return bits == 0xffff;
}
bool is_poison(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits == 0xffffffff;
}

template <class Out>
void compare(const std::vector<Out>& y, const Reference& want, const Case& c, const std::string& what) {
  const int64_t ldy = c.n + c.pad_y;
  long wrong = 0, dirty = 0;
  double worst = 0;
  int64_t worst_at = 0;
  for (int64_t m = 0; m < c.m; m++) {
    for (int64_t n = 0; n < c.n; n++) {
      const double expected = want.sum[m * c.n + n], got = value(y[m * ldy + n]);
      const double allowed = want.size[m * c.n + n] * kSumError +
                             (c.wide ? 0 : std::fabs(expected) * kElementError + kElementQuantum) + 1e-30;
      const double error = std::fabs(got - expected) / allowed;
      if (!(error <= 1)) wrong++;
      if (!(error <= worst) && !std::isnan(worst)) {
        worst = error;
        worst_at = m * c.n + n;
      }
    }
    for (int64_t n = c.n; n < ldy && m + 1 < c.m; n++) dirty += !is_poison(y[m * ldy + n]);
  }
  const int64_t m = worst_at / c.n, n = worst_at % c.n;
  CHECKF(wrong == 0,
         "%s: %ld of %lld wrong; worst at row %lld column %lld: expected %.9g got %.9g, %.3g times the tolerance",
         what.c_str(), wrong, static_cast<long long>(c.m * c.n), static_cast<long long>(m), static_cast<long long>(n),
         want.sum[worst_at], static_cast<double>(value(y[m * ldy + n])), worst);
  CHECKF(dirty == 0, "%s: %ld elements between the rows of y were written", what.c_str(), dirty);
}

// The memory between rows and behind matrices is NaN, which shows if a kernel uses it in a sum.
template <class Out>
void run_case(Bench& bench, const Case& c, const std::vector<GemmPath>& paths, uint64_t seed) {
  const int64_t ldx = c.k + c.pad_x, ldy = c.n + c.pad_y;
  Buffer<Element> x(c.shift_x + (c.m - 1) * ldx + c.k), w(c.shift_w + c.n * c.k), bias(c.n);
  Buffer<Out> y(c.shift_y + (c.m - 1) * ldy + c.n);
  fill(x.data() + c.shift_x, c.m, c.k, ldx, 1.0f, seed);
  fill(w.data() + c.shift_w, c.n, c.k, c.k, 1.0f, seed + 1);
  fill(bias.data(), 1, c.n, c.n, 8.0f, seed + 2);
  const Element* b = c.bias ? bias.data() : nullptr;
  const Reference want = reference(c.m, c.n, c.k, x.data() + c.shift_x, ldx, w.data() + c.shift_w, b);
  for (GemmPath path : paths) {
    if (path == GemmPath::kLibrary && !bench.has_library) continue;
    const std::string what = c.text(path);
    y.poison();
    bench.gemm.force(path);
    bench.gemm.run({{c.m, c.n, c.k, ldx, ldy}, x.data() + c.shift_x, w.data() + c.shift_w, b, y.data() + c.shift_y},
                   nullptr);
    synchronize(what.c_str());
    const GemmPath took = bench.gemm.last_path();
    const bool even = c.k % 8 == 0 && ldx % 8 == 0 && c.shift_x % 8 == 0 && c.shift_w % 8 == 0;
    if (path == GemmPath::kStream) {
      CHECKF((took == path) == (even && c.m <= 16), "%s took %s", what.c_str(), name(took));
    } else if (path == GemmPath::kTile) {
      CHECKF(took == path, "%s took %s", what.c_str(), name(took));
    } else if (path == GemmPath::kLibrary && even && ldy % 8 == 0 && c.shift_y == 0 && !(c.bias && c.wide)) {
      // Any path is fine for tiny matrices.
      CHECKF(took == path || c.n < 64 || c.k < 64, "%s took %s", what.c_str(), name(took));
      bench.refused += took != path;
    }
    compare(y.get((c.m - 1) * ldy + c.n, c.shift_y), want, c, what + " (took " + name(took) + ")");
    y.check_guards("y", what);
  }
  bench.gemm.force(GemmPath::kAuto);
}

void run_any(Bench& bench, const Case& c, uint64_t seed) {
  const std::vector<GemmPath> paths = {GemmPath::kStream, GemmPath::kLibrary, GemmPath::kTile, GemmPath::kAuto};
  if (c.wide) {
    run_case<float>(bench, c, paths, seed);
  } else {
    run_case<Element>(bench, c, paths, seed);
  }
}

// The device reference itself, against a loop on the host.
void test_reference(uint64_t seed) {
  const int64_t M = 19, N = 35, K = 41, ldx = 45;
  Buffer<Element> x(M * ldx), w(N * K), bias(N);
  fill(x.data(), M, K, ldx, 1.0f, seed);
  fill(w.data(), N, K, K, 1.0f, seed + 1);
  fill(bias.data(), 1, N, N, 1.0f, seed + 2);
  const Reference got = reference(M, N, K, x.data(), ldx, w.data(), bias.data());
  const auto hx = x.get(), hw = w.get(), hb = bias.get();
  for (int64_t m = 0; m < M; m++) {
    for (int64_t n = 0; n < N; n++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += static_cast<double>(value(hx[m * ldx + k])) * value(hw[n * K + k]);
      sum += value(hb[n]);
      CHECKF(std::fabs(sum - got.sum[m * N + n]) < 1e-12, "reference at %d %d: %.17g, host %.17g", static_cast<int>(m),
             static_cast<int>(n), got.sum[m * N + n], sum);
    }
  }
}

void test_shapes(Bench& bench, const Options& options) {
  std::mt19937_64 random(options.seed);
  const auto pick = [&](std::initializer_list<int64_t> list) { return list.begin()[random() % list.size()]; };
  const std::vector<int64_t> rows =
      options.quick ? std::vector<int64_t>{1, 8, 9, 33, 130}
                    : std::vector<int64_t>{1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 64, 65, 100, 128, 129, 256, 512};
  for (int64_t m : rows) {
    const std::vector<int64_t> sizes =
        options.quick ? std::vector<int64_t>{17, 72} : std::vector<int64_t>{1, 8, 17, 40, 64, 72, 136, 320, 1000, 1088};
    for (int64_t n : sizes) {
      for (int64_t k : sizes) {
        Case c{m, n, k};
        c.bias = random() % 2;
        c.wide = random() % 2;
        c.pad_x = pick({0, 0, 8, 3, 64});
        c.pad_y = pick({0, 0, 8, 1, 24});
        run_any(bench, c, random());
      }
    }
    // All sizes even, so every path takes them.
    for (int64_t k : {int64_t{64}, int64_t{136}, int64_t{1032}, int64_t{2304}}) {
      Case c{m, 8 * static_cast<int64_t>(1 + random() % 40), k};
      c.pad_x = pick({0, 8, 40});
      c.pad_y = pick({0, 8, 16});
      c.wide = random() % 2;
      c.bias = !c.wide && random() % 2;
      run_any(bench, c, random());
    }
    Case odd{m, 72, 72};
    odd.shift_x = pick({0, 1, 2, 8});
    odd.shift_w = pick({0, 1, 4, 8});
    odd.shift_y = pick({0, 1, 2, 8});
    odd.wide = random() % 2;
    run_any(bench, odd, random());
  }
}

// Enough tiles for the larger of the two tile sizes, with ragged edges.
void test_large(Bench& bench, const Options& options) {
  Case c{130, 8500, 72};
  run_any(bench, c, options.seed);
  if (options.quick) return;
  c = Case{513, 8008, 1000};
  c.pad_x = 8;
  c.pad_y = 3;
  c.bias = true;
  run_any(bench, c, options.seed + 1);
  c = Case{300, 12001, 136};
  c.wide = true;
  c.bias = true;
  run_any(bench, c, options.seed + 2);
}

void test_real_shapes(Bench& bench, const Options& options) {
  struct Shape {
    int64_t n, k;
    bool wide, bias;
  };
  // Qwen3-8B's qkv, o, gate_up, down and a part of its head; Qwen2.5-1.5B's qkv; 30B-A3B's router.
  for (const Shape& s : {Shape{6144, 4096, false, false},
                         {4096, 4096, false, false},
                         {24576, 4096, false, false},
                         {4096, 12288, false, false},
                         {18992, 4096, true, false},
                         {2048, 1536, false, true},
                         {128, 2048, false, false}}) {
    for (int64_t m : {1, 8, 16, 17, 64, 300}) {
      Case c{m, s.n, s.k};
      c.wide = s.wide;
      c.bias = s.bias;
      run_any(bench, c, options.seed + m);
    }
  }
}

// A row's bits depend neither on the other rows nor on its place among them.
void test_invariance(Bench& bench, const Options& options) {
  bench.gemm.force(GemmPath::kStream);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{200, 72}, {333, 1000}, {1024, 4096}}) {
    Buffer<Element> x(16 * k), w(n * k), y(16 * n), one(n);
    fill(x.data(), 16, k, k, 1.0f, options.seed);
    fill(w.data(), n, k, k, 1.0f, options.seed + 1);
    bench.gemm.run({{16, n, k, k, n}, x.data(), w.data(), nullptr, y.data()}, nullptr);
    synchronize("sixteen rows");
    const auto all = y.get();
    for (int64_t m = 1; m <= 16; m++) {
      y.poison();
      bench.gemm.run({{m, n, k, k, n}, x.data(), w.data(), nullptr, y.data()}, nullptr);
      one.poison();
      bench.gemm.run({{1, n, k, k, n}, x.data() + (m - 1) * k, w.data(), nullptr, one.data()}, nullptr);
      synchronize("some rows");
      const auto some = y.get(m * n), alone = one.get();
      CHECKF(std::memcmp(some.data(), all.data(), some.size() * sizeof(Element)) == 0, "m=%lld of 16, n=%lld k=%lld",
             static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k));
      CHECKF(std::memcmp(alone.data(), all.data() + (m - 1) * n, alone.size() * sizeof(Element)) == 0,
             "row %lld alone, n=%lld k=%lld", static_cast<long long>(m - 1), static_cast<long long>(n),
             static_cast<long long>(k));
    }
  }
  bench.gemm.force(GemmPath::kAuto);
}

// NaN and infinity in one row or weight stay in that row or column.
void test_poisoned_inputs(Bench& bench, const Options& options) {
  for (GemmPath path : {GemmPath::kStream, GemmPath::kLibrary, GemmPath::kTile}) {
    if (path == GemmPath::kLibrary && !bench.has_library) continue;
    const int64_t m = 11, n = 72, k = 136;
    Buffer<Element> x(m * k), w(n * k);
    Buffer<float> y(m * n);
    fill(x.data(), m, k, k, 1.0f, options.seed);
    fill(w.data(), n, k, k, 1.0f, options.seed + 1);
    x.put({to_element(NAN)}, 5 * k + 130);
    w.put({to_element(INFINITY)}, 70 * k + 3);
    bench.gemm.force(path);
    bench.gemm.run({{m, n, k, k, n}, x.data(), w.data(), nullptr, y.data()}, nullptr);
    synchronize("poisoned inputs");
    const auto got = y.get();
    for (int64_t i = 0; i < m * n; i++) {
      const bool row = i / n == 5, column = i % n == 70;
      CHECKF(row      ? std::isnan(got[i])
             : column ? std::isinf(got[i])
                      : std::isfinite(got[i]),
             "%s row %d column %d: %g", name(path), static_cast<int>(i / n), static_cast<int>(i % n), got[i]);
    }
  }
  bench.gemm.force(GemmPath::kAuto);
}

void run_bench(Bench& bench) {
  // More weights than the caches hold, used in turn.
  constexpr size_t kPool = size_t{2} << 30;
  Buffer<Element> pool(kPool / 2);
  fill(pool.data(), 1, static_cast<int64_t>(pool.size()), static_cast<int64_t>(pool.size()), 0.1f, 1);
  Buffer<Element> x(4096 * 12288), y(size_t{4096} * 24576);
  Buffer<float> logits(16 * 151936);
  Buffer<uint32_t> to(1);
  fill(x.data(), 4096, 12288, 12288, 1.0f, 2);
  const double bandwidth = read_bandwidth(pool.data(), pool.bytes(), to.data());
  std::printf("read %.0f GB/s\n", bandwidth);
  struct Shape {
    const char* name;
    int64_t n, k;
    bool wide;
  };
  const Shape shapes[] = {{"qkv", 6144, 4096, false},      {"o", 4096, 4096, false},
                          {"gate_up", 24576, 4096, false}, {"down", 4096, 12288, false},
                          {"lm_head", 151936, 4096, true}, {"w 0.6B", 1024, 1024, false}};
  const auto product = [&](const Shape& s, int64_t m, int i) {
    const size_t copies = pool.size() / static_cast<size_t>(s.n * s.k);
    const Element* w = pool.data() + i % copies * static_cast<size_t>(s.n * s.k);
    const GemmShape shape{m, s.n, s.k, s.k, s.n};
    if (s.wide) {
      bench.gemm.run({shape, x.data(), w, nullptr, logits.data()}, nullptr);
    } else {
      bench.gemm.run({shape, x.data(), w, nullptr, y.data()}, nullptr);
    }
  };
  std::printf("%-8s %7s %6s %4s %-8s %9s %9s %7s\n", "product", "n", "k", "m", "path", "us", "GB/s", "of read");
  for (const Shape& s : shapes) {
    for (int64_t m : {1, 2, 4, 8, 12, 16, 24, 32}) {
      for (GemmPath path : {GemmPath::kStream, GemmPath::kLibrary, GemmPath::kTile}) {
        if ((path == GemmPath::kLibrary && !bench.has_library) || (path == GemmPath::kStream && m > 16) ||
            (s.wide && m > 16))
          continue;
        bench.gemm.force(path);
        const double us = microseconds(s.wide ? 20 : 60, [&](int i) { product(s, m, i); });
        const double bytes = 2.0 * (s.n * s.k + m * s.k) + (s.wide ? 4.0 : 2.0) * m * s.n;
        std::printf("%-8s %7lld %6lld %4lld %-8s %9.2f %9.0f %6.1f%%\n", s.name, static_cast<long long>(s.n),
                    static_cast<long long>(s.k), static_cast<long long>(m), name(bench.gemm.last_path()), us,
                    bytes / us * 1e-3, bytes / us * 1e-1 / bandwidth);
      }
    }
  }
  std::printf("%-8s %7s %6s %5s %-8s %9s %9s\n", "product", "n", "k", "m", "path", "us", "TFLOP/s");
  for (const Shape& s : shapes) {
    if (s.wide) continue;
    for (int64_t m : {64, 128, 256, 512, 1024, 4096}) {
      for (GemmPath path : {GemmPath::kLibrary, GemmPath::kTile}) {
        if (path == GemmPath::kLibrary && !bench.has_library) continue;
        bench.gemm.force(path);
        const double us = microseconds(20, [&](int i) { product(s, m, i); });
        std::printf("%-8s %7lld %6lld %5lld %-8s %9.2f %9.1f\n", s.name, static_cast<long long>(s.n),
                    static_cast<long long>(s.k), static_cast<long long>(m), name(bench.gemm.last_path()), us,
                    2.0 * m * s.n * s.k / us * 1e-6);
      }
    }
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  Bench bench;
  std::printf("%s\n", bench.gemm.library().c_str());
  if (!bench.has_library) std::printf("the library's path is NOT tested\n");
  if (options.bench) {
    run_bench(bench);
    return 0;
  }
  // First, while no kernel of the library is loaded. A launch under the sanitizer may wait by itself.
  if (!options.quick) test_loaded_products_do_not_wait(options.seed);
  test_unloaded_products_are_refused(options.seed);
  if (!options.quick) test_order(options.seed);
  test_reference(options.seed);
  test_shapes(bench, options);
  test_large(bench, options);
  if (!options.quick) test_real_shapes(bench, options);
  test_invariance(bench, options);
  test_poisoned_inputs(bench, options);
  std::printf("refused by the library: %ld\n", bench.refused);
  return finish("gemm_test");
}

}  // namespace
}  // namespace refit::test

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // as in the engine
  try {
    return refit::test::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemm_test: %s\n", error.what());
    return 1;
  }
}
