// The times that adapters_test --bench prints.
#pragma once
#include <algorithm>
#include <cstdio>
#include <vector>

#include "test/gpu/adapters/adapters_world.cuh"

namespace refit::test {

// Times of both kernels for the linears of an 8B model, the adapters' bytes once each.
inline void time_adapters() {
  struct Linear {
    const char* name;
    int64_t K;
    std::vector<int64_t> columns;
  };
  const std::vector<Linear> linears = {{"qkv", 4096, {4096, 1024, 1024}},
                                       {"o", 4096, {4096}},
                                       {"gate_up", 4096, {12288, 12288}},
                                       {"down", 12288, {4096}}};
  const int rank = 32, most_slots = 32;
  for (const Linear& linear : linears) {
    int64_t all = 0;
    for (const int64_t n : linear.columns) all += n;
    const auto slices = static_cast<int>(linear.columns.size());
    Buffer<Element> a(most_slots * slices * rank * linear.K), b(most_slots * all * rank);
    fill(a.data(), 1, static_cast<int64_t>(a.size()), 0, 0.1f, 1);
    fill(b.data(), 1, static_cast<int64_t>(b.size()), 0, 0.1f, 2);
    std::vector<float> table;
    for (int i = 0; i < most_slots * slices; i++) table.insert(table.end(), {2.0f, static_cast<float>(rank)});
    Buffer<float> gpu_table(table.size());
    gpu_table.put(table);
    AdapterWeights w{a.data(), b.data(), gpu_table.data(), 2 * int64_t{slices}, rank, slices, {}};
    std::copy(linear.columns.begin(), linear.columns.end(), w.columns);
    for (const int64_t rows : {1, 16, 64, 256, 4096}) {
      Buffer<Element> x(rows * linear.K), t(rows * slices * rank), y(rows * all);
      fill(x.data(), rows, linear.K, linear.K, 1.0f, 3);
      fill(y.data(), rows, all, all, 1.0f, 4);
      for (const int slots : {1, 8, 32}) {
        if (slots > rows) continue;
        std::vector<int32_t> of_rows;
        for (int64_t i = 0; i < rows; i++) of_rows.push_back(static_cast<int32_t>(i * slots / rows));
        Segments segments(of_rows);
        const AdapterSegments s = segments.get();
        const double shrink =
            microseconds(50, [&](int) { cuda::adapter_shrink(w, s, x.data(), linear.K, t.data(), nullptr); });
        const double expand =
            microseconds(50, [&](int) { cuda::adapter_expand(w, s, t.data(), y.data(), all, nullptr); });
        const double bytes = static_cast<double>(slots) * rank * 2e-3;
        std::printf("%-8s %5ld rows, %2d adapters: shrink %6.2f us (%5.0f GB/s), expand %6.2f us (%5.0f GB/s)\n",
                    linear.name, static_cast<long>(rows), slots, shrink,
                    bytes * static_cast<double>(slices * linear.K) / shrink, expand,
                    bytes * static_cast<double>(all) / expand);
      }
    }
  }
}

}  // namespace refit::test
