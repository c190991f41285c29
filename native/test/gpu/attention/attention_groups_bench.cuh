// Speed of decode steps in which sequences sample from the same prompts, at the shapes of an 8B model: 32 query heads,
// 8 KV heads, head_dim 128, pages of 16.
#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "test/gpu/attention/attention_sharing_check.h"
#include "test/gpu/attention/attention_world.cuh"

namespace refit::test {

class GroupsBench {
 public:
  // `samples` sequences of each prompt; each has up to 511 keys of its own behind it. The last page of a prompt is not
  // shared.
  GroupsBench(int sequences, int samples, int prompt) : sequences_(sequences), samples_(samples), prompt_(prompt) {
    std::mt19937_64 rng(1);
    const int shared = (prompt - 1) / kPage;
    for (int i = 0; i < sequences; ++i) {
      const int first = i % (sequences / samples);
      case_.add(prompt + static_cast<int>(rng() % 512), 1, first, i == first ? 0 : shared);
    }
    keys_ = read_once_ = 0;
    for (int i = 0; i < sequences; ++i) {
      keys_ += case_.start_pos[i] + 1;
      read_once_ += case_.start_pos[i] + 1 - (i < sequences / samples ? 0 : shared * kPage);
    }
    const size_t layer = static_cast<size_t>(case_.next_page) * kPage * kKvHeads * kDim;
    layer_ = layer;
    layers_ = static_cast<int>(std::clamp<size_t>((size_t{256} << 20) / (layer * 4), 1, 64));
    k_ = std::make_unique<Buffer<Element>>(layer * layers_);
    v_ = std::make_unique<Buffer<Element>>(layer * layers_);
    fill(k_->data(), case_.next_page * layers_, kPage * kKvHeads * kDim, kPage * kKvHeads * kDim, 1.0f, 1);
    fill(v_->data(), case_.next_page * layers_, kPage * kKvHeads * kDim, kPage * kKvHeads * kDim, 1.0f, 2);
  }

  void run() const {
    const double plain = time(false), shared = time(true), prefixes = time(true, Launches::kPrefixes),
                 items = time(true, Launches::kItems);
    std::printf(
        "%3d sequences, %2d of each prompt of %4d: plain %7.1f us (%4.0f GB/s), shared %6.1f us (%4.0f GB/s), "
        "ratio %.2f; prefixes %5.1f us, items %5.1f us; plan %.0f -> %.0f us\n",
        sequences_, samples_, prompt_, plain, gigabytes(keys_) / plain * 1e6, shared,
        gigabytes(read_once_) / shared * 1e6, plain / shared, prefixes, items, plan_time(false), plan_time(true));
  }

 private:
  static constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kPage = 16, kLdq = (kHeads + 2 * kKvHeads) * kDim;

  enum class Launches { kAll, kPrefixes, kItems };

  static double gigabytes(int64_t keys) { return 4.0e-9 * static_cast<double>(keys) * kKvHeads * kDim; }
  cuda::AttentionPlan plan(bool share) const {
    return cuda::plan_attention(case_.batch(), kHeads / kKvHeads, kKvHeads, cuda::AttentionSplit::kAuto,
                                cuda::WideKernel::kMma, {share ? kPage : 0});
  }
  double plan_time(bool share) const {
    constexpr int kTimes = 10;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimes; ++i) plan(share);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kTimes;
  }
  double time(bool share, Launches launches = Launches::kAll) const {
    const cuda::AttentionPlan plan = this->plan(share);
    AttentionOnGpu on_gpu(case_.pages, plan, kHeads, kDim);
    Buffer<Element> q(static_cast<size_t>(sequences_) * kLdq), out(static_cast<size_t>(sequences_) * kHeads * kDim);
    fill(q.data(), sequences_, kLdq, kLdq, 4.0f, 3);
    cuda::AttentionInput input = on_gpu.input();
    // There is at least one item: the smallest.
    if (launches == Launches::kPrefixes)
      input.items += input.item_count - 1, input.item_count = 1, input.merge_count = 0;
    if (launches == Launches::kItems) input.prefix_count = 0;
    return microseconds(40, [&](int i) {
      const cuda::KvLayer kv{k_->data() + layer_ * (i % layers_),
                             v_->data() + layer_ * (i % layers_),
                             case_.next_page,
                             kPage,
                             kKvHeads,
                             kDim};
      cuda::attention(q.data(), kLdq, input, kv, kHeads, out.data(), nullptr);
    });
  }

  int sequences_, samples_, prompt_, layers_;
  size_t layer_;
  int64_t keys_, read_once_;
  SharingCase case_{kPage};
  std::unique_ptr<Buffer<Element>> k_, v_;
};

inline void bench_groups() {
  for (const int prompt : {512, 2048, 8192}) {
    for (const int samples : {8, 16}) {
      for (const int sequences : {16, 64, 128, 256, 512}) {
        if (static_cast<int64_t>(sequences) * prompt <= 2 << 20) GroupsBench(sequences, samples, prompt).run();
      }
    }
  }
  // Few keys are shared.
  for (const auto& [sequences, prompt] : {std::pair{2, 2048}, {4, 512}, {16, 144}, {256, 144}}) {
    GroupsBench(sequences, 2, prompt).run();
  }
}

}  // namespace refit::test
