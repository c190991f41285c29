// CoreConfig::deterministic: the logprobs of a token are the same bits however its sequence is cut into steps, whatever
// is computed beside it, with graphs and without, with adapters and shared pages, on one rank and on several. Without
// it some differ, which shows that the comparison can fail. Argument: [seed].
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "test/gpu/forward_gpus.cuh"

namespace {

const std::vector<Variant> kVariants = {
    {"llama, long sums", 512, 2, 8, 4, 64, 1536, 320, false, false, false, false},
    {"qwen2, wide heads", 256, 2, 4, 1, 128, 1024, 201, true, false, false, true},
    {"odd heads", 48, 2, 4, 4, 24, 80, 64, true, true, false, false},
    {"qwen3 moe", 256, 2, 8, 2, 64, 96, 120, false, false, true, false, 16, 4, 128, true, {1, 1}},
    {"olmo2", 256, 2, 8, 2, 32, 768, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
};
constexpr int kSlots = 2, kAdapterRank = 32, kAllPages = 320;
const std::vector<int> kLengths = {600, 33, 257, 1, 96, 410, 64, 18, 300, 150};

struct Sequence {
  std::vector<int32_t> tokens, pages;
  int32_t slot = -1;
  int done = 0;
  std::vector<std::vector<float>> expected;  // logprobs of the whole vocabulary, by position
};

enum class Cut { kAny, kPrefillThenDecode, kSmall };

class Test {
 public:
  Test(const Variant& v, unsigned seed, bool adapted)
      : v_(v), rng_(seed), model_(deterministic(v, seed)), adapters_(model_, kSlots, kAdapterRank, seed) {
    int page = 0;
    for (size_t i = 0; i < kLengths.size(); ++i) {
      Sequence s;
      if (adapted) s.slot = static_cast<int32_t>(i * (kSlots + 1) / kLengths.size()) - 1;
      for (int t = 0; t < kLengths[i]; ++t) s.tokens.push_back(static_cast<int32_t>(rng_() % v.vocab));
      // The last sequence begins as the one before.
      const bool shares = i + 1 == kLengths.size();
      if (shares) std::copy_n(sequences_.back().tokens.begin(), kShared, s.tokens.begin());
      for (int p = 0; p * kPageSize < kLengths[i]; ++p) s.pages.push_back(page++);
      sequences_.push_back(s);
    }
    name_ = std::string(v.name) + (adapted ? ", adapters" : "");
    adapted_ = adapted;
  }

  void run() {
    const SlotAdapters* const adapters = adapted_ ? &adapters_ : nullptr;
    Gpus gpu(model_, {0}, nullptr, adapters, kAllPages);
    for (Sequence& s : sequences_) learn(gpu, s);
    for (const Cut cut : {Cut::kAny, Cut::kPrefillThenDecode, Cut::kSmall, Cut::kAny}) {
      const long other = compare(gpu, cut);
      CHECKF(other == 0, "%s, cut %d: %ld rows have other bits", name_.c_str(), static_cast<int>(cut), other);
    }
    gpu.check_guards(name_.c_str());
    Gpus plain(model_, {0}, nullptr, adapters, kAllPages, false);
    const long other = compare(plain, Cut::kAny);
    CHECKF(other == 0, "%s without graphs: %ld rows have other bits", name_.c_str(), other);
    for (const int ranks : {2, 4}) {
      // Ranks gather multiples of 8 columns.
      if (v_.hidden % (8 * ranks) == 0 && v_.heads % ranks == 0) on_ranks(std::vector<int>(ranks, 0), nullptr);
    }
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    if (gpus > 1) {
      on_ranks({0, 1}, nullptr);
      if (const cuda::NcclApi* const nccl = find_api()) on_ranks({0, 1}, nccl);
    }
    TestModel any = model_;
    any.deterministic = false;
    Gpus fast(any, {0}, nullptr, adapters, kAllPages);
    const long expected = compare(fast, Cut::kAny);
    CHECKF(v_.hidden < 256 || expected > 0, "%s: no row differs without `deterministic`", name_.c_str());
    std::printf("%-32s %ld rows equal, %zu graphs; %ld differ without\n", name_.c_str(), rows_, gpu.forward().graphs(),
                expected);
  }

 private:
  static constexpr int kShared = 128;  // whole pages

  static TestModel deterministic(const Variant& v, unsigned seed) {
    TestModel model(v, cuda::kElementType, seed);
    model.deterministic = true;
    return model;
  }

  // Several ranks give the bits of one.
  void on_ranks(const std::vector<int>& gpus, const cuda::NcclApi* nccl) {
    for (const bool graphs : {true, false}) {
      Gpus gpu(model_, gpus, nccl, adapted_ ? &adapters_ : nullptr, kAllPages, graphs);
      const long other = compare(gpu, graphs ? Cut::kPrefillThenDecode : Cut::kAny);
      CHECKF(other == 0, "%s, %zu ranks%s%s: %ld rows have other bits", name_.c_str(), gpus.size(),
             nccl != nullptr ? " through NCCL" : "", graphs ? "" : " without graphs", other);
      gpu.check_guards(name_.c_str());
    }
  }

  // The expected logprobs: the whole sequence alone in one step.
  void learn(Gpus& gpu, Sequence& s) {
    BatchBuilder b;
    b.sequence(s.tokens, 0, s.pages);
    for (int t = 0; t < static_cast<int>(s.tokens.size()); ++t) add_row(b, t);
    const StepResult result = gpu.step(b, true, slots({&s}));
    for (int t = 0; t < static_cast<int>(s.tokens.size()); ++t) s.expected.push_back(by_id(result, t));
  }

  long compare(Gpus& gpu, Cut cut) {
    long differ = 0;
    for (Sequence& s : sequences_) s.done = 0;
    for (int step = 0;; ++step) {
      std::vector<Sequence*> left;
      for (Sequence& s : sequences_) {
        // Some sequences pause.
        if (s.done < static_cast<int>(s.tokens.size()) && rng_() % 5 != 0) left.push_back(&s);
      }
      if (left.empty()) {
        if (std::all_of(sequences_.begin(), sequences_.end(),
                        [](const Sequence& s) { return s.done == static_cast<int>(s.tokens.size()); }))
          return differ;
        continue;
      }
      differ += run_step(gpu, left, cut);
    }
  }

  int take(const Sequence& s, Cut cut, int room) {
    const int left = static_cast<int>(s.tokens.size()) - s.done;
    int n = 1;
    if (cut == Cut::kAny) n = rng_() % 3 == 0 ? 1 : 1 + static_cast<int>(rng_() % 190);
    if (cut == Cut::kSmall) n = 1 + static_cast<int>(rng_() % 40);
    if (cut == Cut::kPrefillThenDecode && s.done == 0) n = std::max(1, left - 12);
    return std::min({n, left, room});
  }

  long run_step(Gpus& gpu, const std::vector<Sequence*>& left, Cut cut) {
    BatchBuilder b;
    std::vector<std::pair<Sequence*, int>> rows;  // and the position
    std::vector<Sequence*> used;
    for (Sequence* s : left) {
      const int n = take(*s, cut, kMaxTokens - static_cast<int>(b.tokens.size()));
      if (n == 0) break;
      const int first = b.sequence({s->tokens.begin() + s->done, s->tokens.begin() + s->done + n}, s->done, table(*s));
      const int some = static_cast<int>(rng_() % 3);  // all tokens are sampled, some, or the last
      for (int t = 0; t < n; ++t) {
        if (some == 2 ? t + 1 < n : some == 1 && rng_() % 2 == 0 && t + 1 < n) continue;
        add_row(b, first + t);
        rows.emplace_back(s, s->done + t);
      }
      s->done += n;
      used.push_back(s);
    }
    const StepResult result = gpu.step(b, true, slots(used));
    long differ = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      const std::vector<float> got = by_id(result, static_cast<int>(r));
      const std::vector<float>& want = rows[r].first->expected[static_cast<size_t>(rows[r].second)];
      differ += std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) != 0;
    }
    rows_ += static_cast<long>(rows.size());
    return differ;
  }

  // Once both have passed them, the last sequence shares the pages of the one before.
  std::vector<int32_t> table(const Sequence& s) const {
    std::vector<int32_t> pages = s.pages;
    const Sequence& owner = *(sequences_.end() - 2);
    const bool same = owner.slot == s.slot && owner.done >= kShared && s.done >= kShared;
    if (&s == &sequences_.back() && same) std::copy_n(owner.pages.begin(), kShared / kPageSize, pages.begin());
    return pages;
  }
  std::vector<int32_t> slots(const std::vector<Sequence*>& used) const {
    std::vector<int32_t> out;
    for (const Sequence* s : used) out.push_back(s->slot);
    return adapted_ ? out : std::vector<int32_t>{};
  }
  void add_row(BatchBuilder& b, int token) const { b.row({.token = token, .top = v_.vocab, .temperature = 0}); }
  std::vector<float> by_id(const StepResult& result, int row) const {
    std::vector<float> out(static_cast<size_t>(v_.vocab), -1.0f);
    for (int i = 0; i < v_.vocab; ++i) {
      const size_t at = static_cast<size_t>(row) * v_.vocab + i;
      const int32_t id = result.top_ids[at];
      if (CHECK(id >= 0 && id < v_.vocab)) out[static_cast<size_t>(id)] = result.top_logprobs[at];
    }
    return out;
  }

  const Variant& v_;
  std::mt19937 rng_;
  const TestModel model_;
  const SlotAdapters adapters_;
  std::vector<Sequence> sequences_;
  std::string name_;
  bool adapted_ = false;
  long rows_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  for (const Variant& v : kVariants) {
    for (const bool adapted : {false, true}) Test(v, seed, adapted).run();
  }
  return finish("deterministic_test");
}
