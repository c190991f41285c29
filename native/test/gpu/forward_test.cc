// Steps on GPUs against the CPU: both in 16 bits, and the distance of each from the CPU in fp32. Several ranks share
// GPU 0, or are on GPUs of their own if there are enough; then they also exchange through NCCL, as on GPUs that do not
// reach each other (--no-peers: only that). Arguments: [--quick] [--bench] [--no-peers] [seed].
#include "cuda/forward/forward.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/device/check.h"
#include "cuda/exchange/exchange.h"
#include "cuda/exchange/peers.h"
#include "test/check.h"
#include "test/forward_reference.h"
#include "test/gpu/forward_gpus.cuh"

using namespace refit;
using namespace refit::test;
using cuda::check;

namespace {

const std::vector<Variant> kVariants = {
    {"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false},
    {"llama, o bias, scaled rope", 48, 2, 4, 4, 24, 80, 64, true, true, false, false, 0, 0, 0, true, {}, 1.3},
    {"qwen2, tied", 64, 2, 8, 2, 8, 128, 97, true, false, false, true},
    {"qwen3, wide heads", 128, 3, 4, 2, 64, 256, 320, false, false, true, true},
    {"one kv head", 64, 1, 8, 1, 128, 64, 50, false, false, true, false},
    {"qwen3 moe", 64, 3, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0, 1}},
    {"qwen3 moe, no renorm", 128, 2, 4, 4, 16, 64, 90, false, false, true, true, 16, 4, 64, false, {1, 1}},
    {"olmo2", 64, 2, 8, 2, 16, 96, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
    {"olmo2, biases, one kv head", 136, 2, 4, 1, 24, 80, 64, true, true, true, true, 0, 0, 0, true, {}, 1.0, true},
    {"gelu", 64,    2, 4, 2, 16,   96, 101, false, false,
     false,  false, 0, 0, 0, true, {}, 1.0, false, Activation::kGeluTanh},
    {"gelu moe", 64,    2, 4, 2,  16,   96,     90,  false, false,
     true,       false, 8, 2, 32, true, {1, 1}, 1.0, false, Activation::kGeluTanh},
};

using Rng = std::mt19937;

std::vector<int32_t> random_tokens(Rng& rng, int n, int vocab) {
  std::vector<int32_t> t(n);
  for (int32_t& x : t) x = static_cast<int32_t>(rng() % vocab);
  return t;
}

// A sequence with all its tokens and pages; each step computes a piece of it.
struct Sequence {
  std::vector<int32_t> tokens, pages;
  int32_t done = 0;
};

// The distance of logprobs from those in fp32.
struct Errors {
  double sum = 0, worst = 0;
  long count = 0;
  void add(double e) {
    if (!(e <= worst)) worst = e;  // a NaN stays
    sum += e, ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
};

// Logprobs by token id of one row that requested the whole vocabulary.
std::vector<float> by_id(const StepResult& result, int row, int vocab) {
  std::vector<float> out(vocab, NAN);
  for (int i = 0; i < vocab; ++i) {
    const size_t at = static_cast<size_t>(row) * vocab + i;
    if (result.top_ids[at] >= 0 && result.top_ids[at] < vocab) out[result.top_ids[at]] = result.top_logprobs[at];
  }
  return out;
}

// Number of experts (of one token in one layer) that both lists contain, in any order.
long same_choices(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b, size_t k) {
  long same = 0;
  for (size_t i = 0; k > 0 && i + k <= a.size(); i += k) {
    std::vector<uint16_t> x(a.begin() + i, a.begin() + i + k), y(b.begin() + i, b.begin() + i + k);
    std::sort(x.begin(), x.end()), std::sort(y.begin(), y.end());
    same += x == y;
  }
  return same;
}

// Each token's experts in each layer exist and are distinct.
bool valid_choices(const std::vector<uint16_t>& experts, size_t k, int count) {
  for (size_t i = 0; i < experts.size(); ++i) {
    const size_t first = i / k * k;
    if (experts[i] >= count) return false;
    for (size_t j = first; j < i; ++j) {
      if (experts[j] == experts[i]) return false;
    }
  }
  return true;
}

std::vector<Sequence> make_sequences(Rng& rng, int vocab, bool quick) {
  std::vector<int32_t> free(kPages);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), rng);
  std::vector<Sequence> sequences;
  const std::vector<int> lengths = quick ? std::vector<int>{5, 40} : std::vector<int>{1, 7, 33, 64, 129, 300, 1100, 16};
  for (const int length : lengths) {
    Sequence s{random_tokens(rng, length, vocab), {}};
    const int pages = (length + kPageSize - 1) / kPageSize;
    for (int i = 0; i < pages; ++i) s.pages.push_back(free.back()), free.pop_back();
    sequences.push_back(std::move(s));
  }
  // A sequence that begins with the pages of another: a prefix that was computed before.
  Sequence shared = sequences.back();
  const Sequence& prefix = sequences[sequences.size() - 2];
  const int common = static_cast<int>(prefix.tokens.size()) / 2 / kPageSize * kPageSize;
  shared.tokens.insert(shared.tokens.begin(), prefix.tokens.begin(), prefix.tokens.begin() + common);
  shared.pages.clear();
  for (int i = 0; i * kPageSize < static_cast<int>(shared.tokens.size()); ++i) {
    if (i < common / kPageSize) {
      shared.pages.push_back(prefix.pages[i]);
    } else {
      shared.pages.push_back(free.back());
      free.pop_back();
    }
  }
  shared.done = common;
  sequences.push_back(std::move(shared));
  return sequences;
}

// Ragged steps until all sequences are done: prefills in chunks of any size together with single tokens.
void test_variant(const Variant& v, const std::vector<int>& gpus, unsigned seed, bool quick,
                  const cuda::NcclApi* nccl = nullptr) {
  Rng rng(seed);
  const int ranks = static_cast<int>(gpus.size());
  char name[128];
  std::snprintf(name, sizeof name, "%s, %d ranks%s%s", v.name, ranks,
                ranks > 1 && gpus[0] != gpus[1] ? " on GPUs of their own" : "", nccl != nullptr ? ", NCCL" : "");
  const TestModel model(v, cuda::kElementType, seed);
  TestModel wide = model;
  wide.dtype = DType::kFloat32;
  auto exact = wide.device(1, 2, "", kPages, kPageSize), host = model.device(ranks, 2, "", kPages, kPageSize);
  // Both ways of exchange compute the same sums.
  std::unique_ptr<Gpus> peers;
  if (nccl != nullptr && all_reach(gpus)) peers = std::make_unique<Gpus>(model, gpus);
  Gpus gpu(model, gpus, nccl);

  std::vector<Sequence> sequences = make_sequences(rng, v.vocab, quick);
  Errors of_gpu, of_host;
  long greedy = 0, greedy_equal = 0, agreed = 0, drawn = 0;
  long choices = 0, gpu_choices = 0, host_choices = 0, both_choices = 0;
  const auto k = static_cast<size_t>(v.experts_per_token);
  for (int round = 0;; ++round) {
    BatchBuilder b;
    bool left = false;
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& s = sequences[i];
      const int rest = static_cast<int>(s.tokens.size()) - s.done;
      // The last sequence waits for the one whose pages it shares.
      const bool waits = i + 1 == sequences.size() && sequences[i - 2].done < s.done;
      left |= rest > 0;
      if (rest == 0 || waits) continue;
      const int room = kMaxTokens - static_cast<int>(b.tokens.size());
      const int wanted = round % 3 == 2 ? 1 : 1 + static_cast<int>(rng() % (round % 3 == 0 ? 600 : 60));
      const int take = std::min({rest, room, wanted});
      if (take <= 0) continue;
      b.sequence({s.tokens.begin() + s.done, s.tokens.begin() + s.done + take}, s.done, s.pages);
      s.done += take;
    }
    if (!left) break;
    if (b.tokens.empty()) continue;
    // Scores of every token over the whole vocabulary, and samples that depend on the position.
    const int scored = static_cast<int>(b.tokens.size());
    for (int t = 0; t < scored; ++t)
      b.row({.token = t, .target = b.tokens[t], .top = v.vocab, .flags = 3, .temperature = 0});
    const int last = scored - 1;
    for (int i = 0; i < 8; ++i) b.row({.token = last, .temperature = 0.5f, .top_p = 0.9f, .seed = seed * 100u + i});
    const StepResult e = b.run(*exact), h = b.run(*host), c = gpu.step(b);
    if (peers) {
      const StepResult p = peers->step(b);
      CHECKF(p.tokens == c.tokens && p.logprobs == c.logprobs && p.top_ids == c.top_ids &&
                 p.top_logprobs == c.top_logprobs && p.experts == c.experts,
             "%s, step %d: other bits than through peer access", name, round);
    }
    if (!CHECKF(c.tokens.size() == e.tokens.size() && c.top_ids.size() == e.top_ids.size(), "%s: sizes", name)) return;
    if (!CHECKF(c.experts.size() == e.experts.size() && valid_choices(c.experts, k, v.experts),
                "%s, step %d: %zu experts are recorded, expected %zu, all different ones below %d in each layer", name,
                round, c.experts.size(), e.experts.size(), v.experts))
      return;
    if (v.experts > 0) {
      choices += static_cast<long>(c.experts.size() / k);
      gpu_choices += same_choices(c.experts, e.experts, k), host_choices += same_choices(h.experts, e.experts, k);
      both_choices += same_choices(c.experts, h.experts, k);
    }
    for (int t = 0; t < scored; ++t) {
      const auto ze = by_id(e, t, v.vocab), zh = by_id(h, t, v.vocab), zc = by_id(c, t, v.vocab);
      double row_gpu = 0, row_host = 0;
      for (int i = 0; i < v.vocab; ++i) {
        row_gpu = std::max(row_gpu, std::abs(double{zc[i]} - ze[i]));
        row_host = std::max(row_host, std::abs(double{zh[i]} - ze[i]));
        if (std::isnan(zc[i])) row_gpu = NAN;
      }
      of_gpu.add(row_gpu), of_host.add(row_host);
      if (!CHECKF(!std::isnan(row_gpu), "%s, step %d: row %d of %d has a NaN", name, round, t, scored)) return;
      CHECKF(c.tokens[t] == b.tokens[t] && c.logprobs[t] == zc[b.tokens[t]],
             "%s, step %d: row %d scores %d (%g), expected %d (%g)", name, round, t, c.tokens[t], c.logprobs[t],
             b.tokens[t], zc[b.tokens[t]]);
      // Positions whose two best tokens are further apart than the error of Element.
      const size_t top = static_cast<size_t>(t) * v.vocab;
      if (e.top_logprobs[top] - e.top_logprobs[top + 1] > 4 * row_host + 0.05) {
        ++greedy;
        greedy_equal += c.top_ids[top] == e.top_ids[top];
      }
    }
    for (int r = scored; r < scored + 8; ++r) {
      ++drawn;
      agreed += c.tokens[r] == h.tokens[r];
    }
    if (round == 0) {
      const StepResult again = gpu.step(b);
      CHECKF(again.tokens == c.tokens && again.top_ids == c.top_ids && again.top_logprobs == c.top_logprobs &&
                 again.experts == c.experts,
             "%s: the same step again has other bits", name);
      // A chunk of a prompt samples nothing, but is recorded.
      BatchBuilder bare;
      bare.tokens = b.tokens, bare.seq_offsets = b.seq_offsets, bare.start_pos = b.start_pos;
      bare.page_offsets = b.page_offsets, bare.pages = b.pages;
      const StepResult quiet = gpu.step(bare);
      CHECKF(quiet.tokens.empty() && quiet.experts == c.experts, "%s: without rows, other experts (%zu, expected %zu)",
             name, quiet.experts.size(), c.experts.size());
    }
  }
  gpu.check_guards(name);
  std::printf(
      "%-46s %5ld rows: error %.4f mean, %.4f most (CPU with its rounding: %.4f, %.4f); greedy %ld of %ld; draws %ld "
      "of %ld\n",
      name, of_gpu.count, of_gpu.mean(), of_gpu.worst, of_host.mean(), of_host.worst, greedy_equal, greedy, agreed,
      drawn);
  if (v.experts > 0) {
    std::printf(
        "%-46s of %ld choices of experts the GPU makes %ld as the CPU in fp32, the CPU with its rounding %ld; %ld "
        "alike\n",
        name, choices, gpu_choices, host_choices, both_choices);
    // A record of other tokens or layers would agree on a few only.
    CHECKF(gpu_choices >= host_choices - choices / 50 - 2,
           "%s: %ld of %ld choices of experts, the CPU with its rounding %ld", name, gpu_choices, choices,
           host_choices);
  }
  CHECKF(of_gpu.mean() <= 2 * of_host.mean() + cuda::of_element(1e-3, 1.25e-4),
         "%s: mean error %g, CPU with its rounding %g", name, of_gpu.mean(), of_host.mean());
  // A single row may be an outlier. A router near a tie may choose other experts, and then a row may be off by
  // anything.
  if (v.experts == 0)
    CHECKF(of_gpu.worst <= 3 * of_host.worst + cuda::of_element(1e-2, 1.25e-3),
           "%s: error %g, CPU with its rounding %g", name, of_gpu.worst, of_host.worst);
  CHECKF(greedy_equal >= greedy - (v.experts > 0 ? greedy / 50 + 1 : 0), "%s: %ld of %ld greedy tokens", name,
         greedy_equal, greedy);
  // Logits differ a little, so some samples do; noise of another position or seed would agree on few.
  CHECKF(agreed * 10 >= drawn * 7, "%s: only %ld of %ld draws agree", name, agreed, drawn);
}

// Refused steps, and steps that grow the blocks: a long history, many results.
void test_limits(const std::vector<int>& gpus) {
  const TestModel model(kVariants[0], cuda::kElementType, 3);
  Gpus gpu(model, gpus);
  const auto refused = [&](const char* part, const BatchBuilder& b) {
    std::string what;
    try {
      gpu.step(b);
    } catch (const std::invalid_argument& error) {
      what = error.what();
    }
    CHECKF(what.find(part) != std::string::npos, "expected '%s' in '%s'", part, what.c_str());
  };
  std::vector<int32_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  BatchBuilder plain;
  plain.sequence({1, 2, 3}, 0, {4});
  plain.row({.token = 2, .top = 101, .temperature = 0});
  const StepResult first = gpu.step(plain);
  CHECK(first.experts.empty());

  BatchBuilder many;
  many.sequence(std::vector<int32_t>(kMaxTokens + 1, 5), 0, pages);
  refused("701 tokens, but this engine was made for at most 700", many);
  BatchBuilder late;
  late.sequence({1}, kMaxContext, pages);
  refused("sequence 0 ends at position 1501", late);
  BatchBuilder wrong;
  wrong.sequence({101}, 0, {0});
  refused("tokens[0] = 101 is outside", wrong);
  BatchBuilder endless;
  endless.sequence({1}, kMaxContext - 1, pages);
  gpu.step(endless);  // allowed; it has no rows
  CHECK(gpu.step(BatchBuilder()).tokens.empty());

  BatchBuilder grown;
  grown.sequence(std::vector<int32_t>(kMaxTokens, 7), 0, pages);
  for (int t = 0; t < kMaxTokens; ++t) grown.row({.token = t, .top = 101, .temperature = 0, .ids = {1, 2, 3}});
  // 8 MB of history: generated tokens 0 to 99 get a large penalty.
  BatchBuilder::Row row{.token = 0, .temperature = 0, .presence = 1000.0f};
  for (int i = 0; i < 2000000; ++i) row.history.push_back(i % 100);
  grown.row(row);
  const StepResult big = gpu.step(grown);
  CHECK(big.top_ids.size() == 70700u && big.id_logprobs.size() == 2100u && big.tokens.back() == 100);
  for (int t = 1; t < kMaxTokens; ++t) {
    // The same token again and again: all keys that it attends to are equal.
    if (!CHECKF(!std::isnan(big.top_logprobs[t * 101]), "row %d of the large step", t)) break;
  }
  const StepResult after = gpu.step(plain);
  CHECK(after.top_ids == first.top_ids && after.top_logprobs == first.top_logprobs);
  gpu.check_guards("limits");
}

// Experts are recorded only on request, and nothing else of the step depends on it.
void test_without_record() {
  TestModel model(kVariants[5], cuda::kElementType, 3);
  BatchBuilder b;
  b.sequence({1, 2, 3, 4, 5}, 0, {4});
  b.row({.token = 4, .top = 120, .temperature = 0});
  const StepResult with = Gpus(model, {0}).step(b);
  model.record = false;
  const StepResult without = Gpus(model, {0}).step(b);
  CHECKF(with.experts.size() == 5u * 2 * 2 && without.experts.empty(), "experts with %zu, without %zu",
         with.experts.size(), without.experts.size());
  CHECK(with.tokens == without.tokens && with.top_ids == without.top_ids && with.top_logprobs == without.top_logprobs);
}

// Time of a step in addition to its kernels: the model is so small that only launches and waits count.
void bench(const std::vector<int>& gpus, const cuda::NcclApi* nccl = nullptr) {
  const TestModel model({"llama", 128, 16, 8, 2, 64, 256, 1000, false, false, false, false}, cuda::kElementType, 3);
  Gpus gpu(model, gpus, nccl);
  for (const int batch : {1, 32}) {
    BatchBuilder b;
    for (int i = 0; i < batch; ++i) b.row({.token = b.sequence({i}, 20, {2 * i, 2 * i + 1})});
    for (int i = 0; i < 10; ++i) gpu.step(b, false);
    const auto start = std::chrono::steady_clock::now();
    const int steps = 100;
    for (int i = 0; i < steps; ++i) gpu.step(b, false);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    std::printf("forward: %zu ranks%s, 16 small layers, batch %d: %.1f us a step\n", gpus.size(),
                nccl != nullptr ? " by NCCL" : "", batch, time.count() / steps);
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Before CUDA starts: a kernel that is loaded at its first launch may wait for a GPU that spins in a collective.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  // Streams of ranks on one GPU must not share a queue, or one would wait behind another's collective.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  bool quick = false, benchmark = false, no_peers = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--bench") == 0) {
      benchmark = true;
    } else if (std::strcmp(argv[i], "--no-peers") == 0) {
      no_peers = true;
    } else {
      seed = static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10));
    }
  }
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  std::printf("forward_test: seed %u, %d GPUs\n", seed, gpus);
  // compute-sanitizer (--quick) would check NCCL's kernels, too, for minutes.
  const cuda::NcclApi* const nccl = no_peers || (!quick && gpus > 1) ? find_api() : nullptr;
  for (const int ranks : {1, 2, 4}) {
    for (const Variant& v : kVariants) {
      const bool chosen = &v == &kVariants[0] || &v == &kVariants[5];
      if (v.heads % ranks != 0 || (quick && (!chosen || ranks > 2))) continue;
      if (!no_peers) test_variant(v, std::vector<int>(ranks, 0), seed, quick);
      std::vector<int> own(ranks);
      std::iota(own.begin(), own.end(), 0);
      if (ranks == 1 || gpus < ranks) continue;
      if (!no_peers && all_reach(own)) test_variant(v, own, seed, quick);
      if (nccl != nullptr) test_variant(v, own, seed, quick, nccl);
    }
  }
  if (no_peers) {
    if (gpus < 2) std::printf("!!!!! ONE GPU: the exchange through NCCL WAS NOT TESTED, it needs two\n");
    CHECK(nccl != nullptr);
  } else if (!quick) {
    test_limits({0});
    test_limits({0, 0});
    test_without_record();
  }
  if (benchmark) {
    bench({0});
    bench({0, 0});
    if (gpus > 1 && all_reach({0, 1})) bench({0, 1});
    if (gpus > 1 && nccl != nullptr) bench({0, 1}, nccl);
  }
  return finish("forward_test");
}
