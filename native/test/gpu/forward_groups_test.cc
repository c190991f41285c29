// Decode steps in which sequences share the pages of their prompt, against the same steps in which each has a copy of
// these pages: equal bit for bit. Argument: [seed].
#include <numeric>

#include "cuda/attention/attention.h"
#include "test/gpu/forward_gpus.cuh"

namespace {

const std::vector<Variant> kVariants = {
    {"llama, many kv heads", 64, 2, 4, 4, 16, 96, 101, false, false, false, false},
    {"qwen3, wide heads", 128, 2, 8, 4, 64, 256, 320, false, false, true, true},
    {"qwen3 moe", 64, 2, 8, 4, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0}},
};
// A prompt of full pages; 20 samples of it and 4 of its beginning.
constexpr int kPrompt = 1040, kBeginning = 592, kSamples = 24, kMostSteps = 14;
constexpr int kPromptPages = kPrompt / kPageSize, kAllPages = (kSamples + 1) * (kPromptPages + 4);

int prompt_of(int sample) { return sample % 6 == 5 ? kBeginning : kPrompt; }

class Test {
 public:
  Test(const Variant& v, unsigned seed)
      : v_(v), rng_(seed), model_(v, cuda::kElementType, seed), gpu_(model_, {0}, nullptr, nullptr, kAllPages) {
    std::vector<int32_t> free(kAllPages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), rng_);
    const auto take = [&free](int count) {
      std::vector<int32_t> pages(free.end() - count, free.end());
      free.resize(free.size() - static_cast<size_t>(count));
      return pages;
    };
    for (int t = 0; t < kPrompt; ++t) prompt_.push_back(static_cast<int32_t>(rng_() % v.vocab));
    const std::vector<int32_t> prompt_pages = take(kPromptPages);
    prefill(prompt_pages);
    for (int i = 0; i < kSamples; ++i) {
      const int pages = prompt_of(i) / kPageSize;
      std::vector<int32_t> shared(prompt_pages.begin(), prompt_pages.begin() + pages), own = take(kPromptPages);
      prefill(own);
      own.resize(pages);
      for (std::vector<int32_t>* table : {&shared, &own}) {
        for (const int32_t page : take(1)) table->push_back(page);
      }
      shared_.push_back(shared), own_.push_back(own);
      tokens_.push_back(static_cast<int32_t>(rng_() % v.vocab));
    }
  }

  void run() {
    std::vector<int> order(kSamples), steps(kSamples, 0);
    std::iota(order.begin(), order.end(), 0);
    for (int step = 0; step < kMostSteps; ++step) {
      std::shuffle(order.begin(), order.end(), rng_);
      // Samples advance at different rates, and some have just begun.
      const std::vector<int> which(order.begin(), order.begin() + (step % 3 == 0 ? kSamples : kSamples - 2));
      const BatchBuilder shared = decode(which, steps, shared_), own = decode(which, steps, own_);
      const StepBatch batch = shared.view();
      const auto plan = [&](const StepBatch& b) {
        return cuda::plan_attention(b, v_.heads / v_.kv_heads, v_.kv_heads, cuda::AttentionSplit::kAuto,
                                    cuda::WideKernel::kMma, {kPageSize});
      };
      CHECKF(!plan(batch).prefixes.empty(), "%s, step %d: no keys are shared", v_.name, step);
      CHECKF(plan(own.view()).prefixes.empty(), "%s, step %d: keys of copies are shared", v_.name, step);
      const StepResult a = gpu_.step(shared), b = gpu_.step(own);
      CHECKF(a.tokens == b.tokens && a.logprobs == b.logprobs && a.top_ids == b.top_ids &&
                 a.top_logprobs == b.top_logprobs && a.experts == b.experts,
             "%s, step %d: other bits with shared keys", v_.name, step);
      for (const float p : a.top_logprobs) {
        if (!CHECKF(p == p, "%s, step %d: a NaN", v_.name, step)) break;
      }
      for (size_t i = 0; i < which.size(); ++i) tokens_[which[i]] = a.tokens[i], ++steps[which[i]];
    }
    gpu_.check_guards(v_.name);
    std::printf("%-26s equal with shared and with own pages; %zu graphs\n", v_.name, gpu_.forward().graphs());
  }

 private:
  void prefill(const std::vector<int32_t>& pages) {
    for (int done = 0; done < kPrompt;) {
      const int take = std::min(kPrompt - done, kMaxTokens);
      BatchBuilder b;
      b.sequence({prompt_.begin() + done, prompt_.begin() + done + take}, done, pages);
      gpu_.step(b);
      done += take;
    }
  }
  BatchBuilder decode(const std::vector<int>& which, const std::vector<int>& steps,
                      const std::vector<std::vector<int32_t>>& tables) const {
    BatchBuilder b;
    for (const int i : which) {
      const int token = b.sequence({tokens_[i]}, prompt_of(i) + steps[i], tables[i]);
      b.row({.token = token, .top = v_.vocab, .flags = 1, .temperature = 0.7f, .seed = static_cast<uint64_t>(i)});
    }
    return b;
  }

  const Variant& v_;
  std::mt19937 rng_;
  const TestModel model_;
  Gpus gpu_;
  std::vector<int32_t> prompt_, tokens_;            // the prompt's, and the next of each sample
  std::vector<std::vector<int32_t>> shared_, own_;  // page tables
};

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  for (const Variant& v : kVariants) Test(v, seed).run();
  return finish("forward_groups_test");
}
