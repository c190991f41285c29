// Steps with adapters against the CPU's forward pass of models with the adapters merged into their weights, in fp32;
// the same bits for a sequence alone and among others. Several ranks share GPU 0.   Arguments: [--quick] [seed].
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "test/gpu/forward_gpus.cuh"

namespace {

const std::vector<Variant> kVariants = {
    {"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false},
    {"llama, biases", 48, 2, 4, 4, 24, 80, 64, true, true, false, false},
    {"qwen3, tied, one kv head", 64, 1, 8, 1, 128, 64, 50, false, false, true, true},
    {"qwen3 moe", 64, 3, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0, 1}},
    {"olmo2", 64, 2, 8, 2, 16, 96, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
};
constexpr int kSlots = 3;

struct Sequence {
  std::vector<int32_t> tokens, pages;
  int32_t slot;
};

// Sequences of all slots and of the base model, in the order of slots.
std::vector<Sequence> make_sequences(std::mt19937& rng, int vocab, const std::vector<int>& lengths) {
  std::vector<Sequence> out;
  int page = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Sequence s{{}, {}, static_cast<int32_t>(i * (kSlots + 1) / lengths.size()) - 1};
    for (int t = 0; t < lengths[i]; ++t) s.tokens.push_back(static_cast<int32_t>(rng() % vocab));
    for (int p = 0; p * kPageSize < lengths[i]; ++p) s.pages.push_back(page++);
    out.push_back(std::move(s));
  }
  return out;
}

// The whole of each sequence in one step, or its last token alone; all its rows with the whole vocabulary.
struct Batch {
  BatchBuilder b;
  std::vector<int32_t> slots;

  void add(const Sequence& s, int begin, int vocab) {
    const int32_t first = b.sequence({s.tokens.begin() + begin, s.tokens.end()}, begin, s.pages);
    for (int t = first; t < static_cast<int>(b.tokens.size()); ++t)
      b.row({.token = t, .target = b.tokens[t], .top = vocab, .flags = 3, .temperature = 0});
    slots.push_back(s.slot);
  }
};

std::vector<float> by_id(const StepResult& result, int row, int vocab) {
  std::vector<float> out(vocab, NAN);
  for (int i = 0; i < vocab; ++i) {
    const size_t at = static_cast<size_t>(row) * vocab + i;
    if (result.top_ids[at] >= 0 && result.top_ids[at] < vocab) out[result.top_ids[at]] = result.top_logprobs[at];
  }
  return out;
}

struct Errors {
  double sum = 0;
  long count = 0;
  void add(const std::vector<float>& got, const std::vector<float>& want) {
    double most = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      if (!(std::abs(double{got[i]} - want[i]) <= most)) most = std::abs(double{got[i]} - want[i]);
    }
    sum += most, ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
};

// Results of a batch on CPUs, one for each slot: with merged weights, and without (the base model) as the first.
std::vector<StepResult> on_cpus(std::vector<std::unique_ptr<Device>>& devices, const BatchBuilder& b) {
  std::vector<StepResult> out;
  for (auto& device : devices) out.push_back(b.run(*device));
  return out;
}

void test_variant(const Variant& v, int ranks, unsigned seed, bool quick) {
  std::mt19937 rng(seed);
  const std::string name = std::string(v.name) + ", " + std::to_string(ranks) + " ranks";
  const TestModel model(v, cuda::kElementType, seed);
  const SlotAdapters adapters(model, kSlots, 32, seed + 1);
  std::vector<std::unique_ptr<Device>> exact, rounded;
  for (int slot = -1; slot < kSlots; ++slot) {
    TestModel merged = slot < 0 ? model : adapters.merged(slot);
    rounded.push_back(merged.device(1, 2, "", kPages, kPageSize));
    merged.dtype = DType::kFloat32;
    exact.push_back(merged.device(1, 2, "", kPages, kPageSize));
  }
  Gpus gpu(model, std::vector<int>(ranks, 0), nullptr, &adapters);
  const std::vector<int> lengths =
      quick ? std::vector<int>{3, 20, 5, 9} : std::vector<int>{1, 70, 33, 5, 130, 2, 17, 40};
  const std::vector<Sequence> sequences = make_sequences(rng, v.vocab, lengths);
  Errors of_gpu, of_host, of_base;
  // All prompts at once; then the last tokens again.
  for (const bool last : {false, true}) {
    Batch batch;
    for (const Sequence& s : sequences) batch.add(s, last ? static_cast<int>(s.tokens.size()) - 1 : 0, v.vocab);
    const StepResult got = gpu.step(batch.b, true, batch.slots);
    const std::vector<StepResult> want = on_cpus(exact, batch.b), host = on_cpus(rounded, batch.b);
    const StepResult again = gpu.step(batch.b, true, batch.slots);
    CHECKF(got.top_logprobs == again.top_logprobs && got.top_ids == again.top_ids, "%s: other bits again",
           name.c_str());
    int row = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const auto slot = static_cast<size_t>(sequences[i].slot + 1);
      for (const int end = row + batch.b.seq_offsets[i + 1] - batch.b.seq_offsets[i]; row < end; ++row) {
        const auto right = by_id(want[slot], row, v.vocab);
        of_gpu.add(by_id(got, row, v.vocab), right);
        of_host.add(by_id(host[slot], row, v.vocab), right);
        if (slot > 0) of_base.add(by_id(want[0], row, v.vocab), right);
      }
    }
  }
  gpu.check_guards(name.c_str());
  std::printf("%-36s %4ld rows: error %.4f (CPU with merged, rounded weights: %.4f; without adapters: %.4f)\n",
              name.c_str(), of_gpu.count, of_gpu.mean(), of_host.mean(), of_base.mean());
  CHECKF(of_gpu.mean() <= 2 * of_host.mean() + cuda::of_element(2e-3, 2.5e-4), "%s: mean error %g, CPU %g",
         name.c_str(), of_gpu.mean(), of_host.mean());
  CHECKF(of_base.mean() > 5 * of_host.mean(), "%s: the adapters change the logprobs by %g only", name.c_str(),
         of_base.mean());
}

// A sequence has the same bits alone as among sequences of other adapters, and those of the base model have the bits of
// an engine without slots. Few tokens: our own kernels compute all products.
void test_alone(const Variant& v, unsigned seed) {
  std::mt19937 rng(seed);
  const TestModel model(v, cuda::kElementType, seed);
  const SlotAdapters adapters(model, kSlots, 48, seed + 1);
  Gpus gpu(model, {0}, nullptr, &adapters), plain(model, {0});
  const std::vector<Sequence> sequences = make_sequences(rng, v.vocab, {3, 1, 2, 4, 1, 2, 2, 1});
  Batch all;
  for (const Sequence& s : sequences) all.add(s, 0, v.vocab);
  const StepResult together = gpu.step(all.b, true, all.slots);
  size_t row = 0;
  for (const Sequence& s : sequences) {
    Batch one;
    one.add(s, 0, v.vocab);
    const StepResult alone = gpu.step(one.b, true, one.slots);
    const auto equal = [&](const StepResult& other) {
      const size_t at = row * v.vocab;
      return std::equal(other.top_logprobs.begin(), other.top_logprobs.end(), together.top_logprobs.begin() + at) &&
             std::equal(other.top_ids.begin(), other.top_ids.end(), together.top_ids.begin() + at);
    };
    CHECKF(equal(alone), "%s: a sequence of slot %d has other bits alone", v.name, s.slot);
    if (s.slot < 0) CHECKF(equal(plain.step(one.b)), "%s: the base model has other bits without slots", v.name);
    row += s.tokens.size();
  }
}

// Slots that do not exist are refused.
void test_refusals() {
  const TestModel model(kVariants[0], cuda::kElementType, 3);
  const SlotAdapters adapters(model, kSlots, 16, 4);
  Gpus gpu(model, {0}, nullptr, &adapters);
  BatchBuilder b;
  b.sequence({1, 2, 3}, 0, {4});
  bool refused = false;
  try {
    gpu.step(b, true, {kSlots});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  bool quick = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else {
      seed = static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10));
    }
  }
  std::printf("adapters_forward_test: seed %u\n", seed);
  for (const int ranks : {1, 2, 4}) {
    for (const Variant& v : kVariants) {
      const bool chosen = &v == &kVariants[0] || &v == &kVariants[3];
      if (v.heads % ranks != 0 || (quick && (!chosen || ranks > 1))) continue;
      test_variant(v, ranks, seed, quick);
    }
  }
  for (const Variant& v : kVariants) {
    if (!quick || &v == &kVariants[3]) test_alone(v, seed);
  }
  test_refusals();
  return finish("adapters_forward_test");
}
