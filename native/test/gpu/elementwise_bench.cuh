// Speed of the small kernels at the sizes of an 8B model.
#pragma once
#include "cuda/forward/elementwise.h"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {

inline void bench_elementwise() {
  constexpr int kHidden = 4096, kHeads = 32, kKvHeads = 8, kDim = 128, kInter = 12288, kPage = 16;
  for (int count : {1, 8, 64, 512, 4096}) {
    const int64_t cols = (kHeads + 2 * kKvHeads) * kDim;
    Buffer<Element> h(static_cast<size_t>(count) * kHidden), d(h.size()), out(h.size()), weight(kHidden), norm(kDim);
    Buffer<Element> qkv(count * cols), wide(static_cast<size_t>(count) * 2 * kInter), act(wide.size() / 2);
    Buffer<Element> table(static_cast<size_t>(4096) * kHidden);
    const int pages = (count + kPage - 1) / kPage;
    Buffer<Element> k(static_cast<size_t>(pages) * kPage * kKvHeads * kDim), v(k.size());
    Buffer<float> rope(static_cast<size_t>(count) * kDim);
    Buffer<int32_t> ids(count);
    std::vector<int32_t> all(count);
    for (int i = 0; i < count; ++i) all[i] = i;
    ids.put(all);
    rope.put(std::vector<float>(rope.size(), 0.5f));
    for (Buffer<Element>* b : {&h, &d, &weight, &norm, &qkv, &wide, &table}) {
      fill(b->data(), 1, static_cast<int64_t>(b->size()), static_cast<int64_t>(b->size()), 1.0f, 1);
    }
    const auto line = [count](const char* name, double us, double bytes) {
      std::printf("%-14s %5d tokens: %7.2f us, %6.0f GB/s\n", name, count, us, bytes / us * 1e-3);
    };
    const double rows = static_cast<double>(count) * kHidden * 2;
    line("embed",
         microseconds(
             200, [&](int) { cuda::embed(ids.data(), count, table.data(), 0, 4096, kHidden, out.data(), nullptr); }),
         2 * rows);
    line("add_norm",
         microseconds(200,
                      [&](int) {
                        cuda::add_norm(h.data(), d.data(), nullptr, weight.data(), 1e-6f, count, kHidden, out.data(),
                                       nullptr);
                      }),
         4 * rows);
    line("norm_rows",
         microseconds(200,
                      [&](int) {
                        cuda::norm_rows(h.data(), ids.data(), count, weight.data(), 1e-6f, kHidden, out.data(),
                                        nullptr);
                      }),
         2 * rows);
    line("rope_and_cache",
         microseconds(200,
                      [&](int) {
                        cuda::rope_and_cache(qkv.data(), {norm.data(), norm.data(), 1e-6f}, rope.data(), ids.data(),
                                             ids.data(), count, kHeads,
                                             {k.data(), v.data(), pages, kPage, kKvHeads, kDim}, nullptr);
                      }),
         2.0 * count * (cols + (kHeads + 3 * kKvHeads) * kDim));
    line("activate_mul",
         microseconds(
             200, [&](int) { cuda::activate_mul(Activation::kSilu, wide.data(), act.data(), count, kInter, nullptr); }),
         6.0 * count * kInter);
  }
}

}  // namespace refit::test
