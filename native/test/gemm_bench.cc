// Compares matrix products with a plain vectorised read of the same weights: gemm_bench [threads] [isa ...]. It is
// built by hand. The weights (bf16, 4096 x 4096 each, 768 MB in all) do not fit any cache; every number is the median
// of several passes over all of them. Reads and products alternate, so a busy machine slows both equally.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/pool.h"
#include "cpu/kernels.h"

namespace {

using namespace refit;
using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

volatile uint64_t sink;

#if defined(__x86_64__)
__attribute__((target_clones("default", "avx2", "avx512f")))
#endif
uint64_t
sum_words(const uint64_t* p, size_t n) {
  uint64_t lane[32] = {};
  for (size_t i = 0; i + 32 <= n; i += 32) {
    for (size_t j = 0; j < 32; j++) lane[j] += p[i + j];
  }
  uint64_t sum = 0;
  for (uint64_t x : lane) sum += x;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  std::vector<std::string> isas(argv + std::min(argc, 2), argv + argc);
  if (isas.empty()) isas = cpu::isas();
  Pool pool(threads);
  const int64_t N = 4096, K = 4096, count = 24;
  const int64_t matrix = N * K * 2;
  Arena arena(static_cast<size_t>(matrix * count));
  auto* base = static_cast<uint8_t*>(arena.carve(static_cast<size_t>(matrix * count)));
  auto* half = reinterpret_cast<uint16_t*>(base);
  for (int64_t i = 0; i < N * K * count; i++)
    half[i] = static_cast<uint16_t>(0x3c00 + (i * 2654435761u >> 20 & 0x80ff));

  auto read_all = [&] {
    const auto start = Clock::now();
    // One contiguous part per thread, in pieces, so other threads can help a slow one.
    const int64_t pieces = 8 * threads, bytes = matrix * count / pieces;
    pool.parallel_for(pieces, [&](int64_t i, int) {
      sink = sum_words(reinterpret_cast<const uint64_t*>(base + i * bytes), static_cast<size_t>(bytes / 8));
    });
    return seconds(start);
  };
  read_all();
  std::printf("%d threads, weights %.0f MB\n", threads, matrix * count / 1e6);
  std::printf("%-11s %5s %12s %10s %12s %8s\n", "isa", "M", "ms/matrix", "GFLOP/s", "GB/s", "of read");
  for (const std::string& isa : isas) {
    const cpu::Kernels& k = cpu::kernels(isa);
    for (int64_t M : {1, 2, 4, 8, 16, 32, 64, 512}) {
      std::vector<float> x(static_cast<size_t>(M * K)), y(static_cast<size_t>(M * N));
      for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(static_cast<int>(i * 7919 % 257) - 128) / 128.0f;
      // Enough matrices to exceed the cache; fewer if the arithmetic takes most of the time.
      const int64_t used = M <= 16 ? count : M <= 64 ? 8 : 2;
      std::vector<double> products, reads;
      for (int r = 0; r < 5; r++) {
        if (M <= 16) reads.push_back(read_all() / count);
        const auto start = Clock::now();
        for (int64_t i = 0; i < used; i++) {
          k.gemm(pool, x.data(), K, base + i * matrix, DType::kBFloat16, nullptr, y.data(), N, M, N, K);
        }
        products.push_back(seconds(start) / static_cast<double>(used));
      }
      const double t = median(products);
      std::printf("%-11s %5ld %12.3f %10.1f %12.1f", isa.c_str(), static_cast<long>(M), t * 1e3,
                  2.0 * M * N * K / t / 1e9, matrix / t / 1e9);
      if (M <= 16) {
        std::printf(" %7.0f%%", 100 * median(reads) / t);
        std::printf("   (read %.1f GB/s)", matrix / median(reads) / 1e9);
      }
      std::printf("\n");
      if (k.name == std::string("scalar") && M >= 64) break;
    }
  }
}
