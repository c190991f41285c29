// Speed of attention at the shapes of an 8B model: 32 query heads, 8 KV heads, head_dim 128, pages of 16. Prefill also
// with 4 KV heads, as in a 30B-A3B.
#pragma once
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "test/gpu/attention/attention_plan_check.h"
#include "test/gpu/attention/attention_world.cuh"

namespace refit::test {

// `count` sequences at `start` with `fresh` new tokens each.
inline void bench_attention_shape(int count, int start, int fresh, cuda::AttentionSplit split, const char* name,
                                  double bandwidth, int kv_heads = 8, cuda::WideKernel wide = cuda::WideKernel::kMma) {
  constexpr int kHeads = 32, kDim = 128, kPage = 16;
  const int per_sequence = (start + fresh + kPage - 1) / kPage, pages = per_sequence * count;
  const size_t layer = static_cast<size_t>(pages) * kv_heads * kPage * kDim;
  // Several layers if one would stay in L2.
  const int layers = static_cast<int>(std::clamp<size_t>((size_t{256} << 20) / (layer * 4), 1, 64));
  Buffer<Element> k(layer * layers), v(layer * layers);
  fill(k.data(), pages * layers, layer / pages, layer / pages, 1.0f, 1);
  fill(v.data(), pages * layers, layer / pages, layer / pages, 1.0f, 2);

  PlanCase c;
  for (int i = 0; i < count; ++i) c.add(start, fresh);
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(1));
  const cuda::AttentionPlan plan = cuda::plan_attention(c.batch(), kHeads / kv_heads, kv_heads, split, wide);

  Buffer<cuda::AttentionItem> items(plan.items.size());
  Buffer<cuda::AttentionMerge> merges(plan.merges.size());
  Buffer<int32_t> table_gpu(table.size());
  items.put(plan.items);
  merges.put(plan.merges);
  table_gpu.put(table);
  Buffer<float> parts(static_cast<size_t>(plan.part_rows) * kHeads * (kDim + 2));
  const int64_t tokens = static_cast<int64_t>(count) * fresh, ldq = (kHeads + 2 * kv_heads) * kDim;
  Buffer<Element> q(tokens * ldq), out(tokens * kHeads * kDim);
  fill(q.data(), tokens, ldq, ldq, 4.0f, 3);
  const cuda::AttentionInput input{items.data(),     static_cast<int>(plan.items.size()),
                                   merges.data(),    static_cast<int>(plan.merges.size()),
                                   table_gpu.data(), parts.data(),
                                   plan.wide_items,  plan.wide};
  const double us = microseconds(fresh == 1 ? 200 : 20, [&](int i) {
    const cuda::KvLayer kv{
        k.data() + layer * (i % layers), v.data() + layer * (i % layers), pages, kPage, kv_heads, kDim};
    cuda::attention(q.data(), ldq, input, kv, kHeads, out.data(), nullptr);
  });
  std::printf("32/%d heads, %3d sequences, %6d + %5d tokens, %-6s: %6zu items, %4zu merges, %9.1f us", kv_heads, count,
              start, fresh, name, plan.items.size(), plan.merges.size(), us);
  if (fresh == 1) {
    const double bytes = 4.0 * count * (start + 1) * kv_heads * kDim;
    std::printf(", %6.0f GB/s (%.0f %% of reading)\n", bytes / us * 1e-3, bytes / us * 1e-1 / bandwidth);
  } else {
    const double seen = count * (static_cast<double>(start) * fresh + 0.5 * fresh * (fresh + 1.0));
    std::printf(", %6.1f TFLOP/s\n", 4.0 * seen * kHeads * kDim / us * 1e-6);
  }
}

inline void bench_decode() {
  double bandwidth;
  {
    Buffer<uint8_t> memory(size_t{4} << 30);
    Buffer<uint32_t> to(1);
    bandwidth = read_bandwidth(memory.data(), memory.size(), to.data());
    std::printf("reading: %.0f GB/s\n", bandwidth);
  }
  using cuda::AttentionSplit;
  const std::pair<int, int> decodes[] = {{1, 1023},  {1, 4095},  {1, 32767}, {8, 1023},  {8, 4095},
                                         {16, 4095}, {32, 4095}, {64, 1023}, {64, 4095}, {256, 1023}};
  for (const auto& [count, start] : decodes) {
    for (const auto& [split, name] : {std::pair{AttentionSplit::kAuto, "auto"},
                                      {AttentionSplit::kAlways, "always"},
                                      {AttentionSplit::kNever, "never"}}) {
      bench_attention_shape(count, start, 1, split, name, bandwidth);
    }
  }
}

inline void bench_prefill() {
  const bool hopper = cuda::wide_kernel_here(128, false) == cuda::WideKernel::kHopper;
  const int prefills[][3] = {{1, 0, 512},   {1, 0, 2048},     {1, 0, 4096},   {1, 0, 16384},
                             {8, 0, 1024},  {1, 28672, 4096}, {1, 8192, 256}, {64, 1008, 16},
                             {16, 960, 64}, {32, 0, 100},     {1, 1960, 64},  {1, 1000, 100}};
  for (int kv_heads : {8, 4}) {
    for (const auto& [count, start, fresh] : prefills) {
      for (const auto wide : kWideKernels) {
        if (wide != cuda::WideKernel::kMma && !hopper) continue;
        bench_attention_shape(count, start, fresh, cuda::AttentionSplit::kAuto, name_of(wide), 1.0, kv_heads, wide);
      }
    }
  }
}

inline void bench_attention(bool decode) {
  if (decode) bench_decode();
  bench_prefill();
}

}  // namespace refit::test
