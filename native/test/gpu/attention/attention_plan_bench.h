// Time of plans with shared keys on the CPU. Needs no GPU.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "test/gpu/attention/attention_sharing_check.h"

namespace refit::test {

inline double plan_microseconds(const SharingCase& c, bool share) {
  std::vector<double> times;
  for (int i = 0; i < 101; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const cuda::AttentionPlan plan = cuda::plan_attention(c.batch(), 4, 8, cuda::AttentionSplit::kAuto,
                                                          cuda::WideKernel::kMma, {share ? c.page_size : 0});
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + 50, times.end());
  return times[50];
}

inline void bench_plan(const char* what, const SharingCase& c) {
  std::printf("plan of %4zu sequences, %-34s: %7.1f us, with shared keys %8.1f us\n", c.tables.size(), what,
              plan_microseconds(c, false), plan_microseconds(c, true));
}

inline void bench_plans() {
  constexpr int kPage = 16;
  for (const int sequences : {64, 512, 2048}) {
    for (const int pages : {32, 128, 512}) {
      SharingCase samples(kPage);
      for (int i = 0; i < sequences; ++i) {
        samples.add(pages * kPage + i % 509, 1, i / 8 * 8, i % 8 == 0 ? 0 : pages - 1);
      }
      char what[64];
      std::snprintf(what, sizeof(what), "8 of each prompt of %d tokens", pages * kPage);
      bench_plan(what, samples);
    }
    SharingCase none(kPage), chain(kPage), leave(kPage), tree(kPage);
    for (int i = 0; i < sequences; ++i) {
      none.add(2048 + i % 509, 1);
      chain.add((i + 1) * kPage, 1, std::max(0, i - 1), i);
      leave.add(sequences * kPage, 1, 0, i);
      // Node i of a binary tree: its parent's pages and 8 of its own.
      int depth = 0;
      for (int node = i + 1; node > 1; node /= 2) ++depth;
      tree.add((depth + 1) * 8 * kPage, 1, i == 0 ? 0 : (i + 1) / 2 - 1, depth * 8);
    }
    bench_plan("nothing shared", none);
    bench_plan("each begins with the one before", chain);
    bench_plan("one leaves the others at each page", leave);
    bench_plan("a binary tree", tree);
  }
}

}  // namespace refit::test
