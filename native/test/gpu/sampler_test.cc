// The GPU's sampler against the CPU's, row by row. Arguments: [--quick] [--bench] [seed].
#include "cpu/sampler/sampler.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "core/philox.h"
#include "cpu/kernels.h"
#include "cpu/sampler/sampler_penalty.h"
#include "cuda/device/check.h"
#include "cuda/sampler/sampler.h"
#include "test/check.h"
#include "test/forward_reference.h"
#include "test/gpu/sampler_compare.h"

using namespace refit;
using namespace refit::test;
using cuda::check;

namespace {

using Rng = std::mt19937;

// Kinds of logits: like a model's, flat, with many ties, with hostile values.
std::vector<float> some_logits(Rng& rng, int n, int kind) {
  std::vector<float> z(n);
  const auto pick = [&] { return z.begin() + rng() % n; };
  // A sum of uniform numbers is close enough to normal, and fast.
  const auto normal = [&] {
    float s = 0;
    for (int i = 0; i < 4; ++i) s += static_cast<float>(rng() >> 8) * 0x1p-24f;
    return (s - 2.0f) * 1.7f;
  };
  const float scale = kind % 3 == 0 ? 3.0f : kind % 3 == 1 ? 0.05f : 12.0f;
  for (float& x : z) x = normal() * scale;
  switch (kind % 12) {
    case 3:
      for (float& x : z) x = std::round(x);  // ties
      break;
    case 4:
      std::fill(z.begin(), z.end(), -3.25f);
      break;
    case 5:
      *pick() = kNaN;
      break;
    case 6:
      std::fill(z.begin(), z.end(), -kInf);
      if (rng() % 2 == 0) *pick() = 4.0f;
      break;
    case 7:
      *pick() = kInf;
      *pick() = -kInf;
      break;
    case 8:
      std::fill(z.begin(), z.end(), kNaN);
      if (rng() % 2 == 0) *pick() = -kInf;
      break;
    case 9:
      for (float& x : z) x = rng() % 2 == 0 ? 0.0f : -0.0f;
      break;
    case 10:
      *pick() = 1e30f, *pick() = -1e30f, *pick() = 3.4e38f;
      break;
    case 11:
      for (float& x : z) x = rng() % 3 == 0 ? x : -kInf;
      break;
    default:
      break;
  }
  return z;
}

Row some_row(Rng& rng, int vocab, int i) {
  Row row;
  const auto chance = [&](unsigned n) { return rng() % n == 0; };
  const auto token = [&] { return static_cast<int32_t>(rng() % vocab); };
  row.seed = (static_cast<uint64_t>(rng()) << 32) | rng();
  row.flags = static_cast<int>(rng() % 8);
  const float temperatures[] = {0.0f, 1.0f, 0.7f, 1.9f, 1.0f, 0.01f};
  row.temperature = temperatures[i % 6];
  if (chance(5)) row.target = token();
  if (chance(2)) row.top_k = chance(6) ? 1 : static_cast<int>(rng() % (chance(2) ? vocab + 3 : std::min(vocab, 60)));
  if (chance(2)) row.top_p = chance(8) ? 0.0f : static_cast<float>(rng() % 1001) / 1000;
  if (chance(4)) row.min_p = static_cast<float>(rng() % 101) / 100;
  if (chance(3)) row.top = static_cast<int>(rng() % (chance(4) ? std::min(vocab, 6000) : std::min(vocab, 21)));
  if (chance(3)) {
    const int n = static_cast<int>(rng() % (chance(3) ? 5000 : 20));
    const bool few = chance(2);
    for (int j = 0; j < n; ++j) row.history.push_back(few ? token() % std::min(vocab, 9) : token());
    row.history_prompt = n == 0 ? 0 : static_cast<int>(rng() % (n + 1));
    if (!chance(4)) row.frequency = static_cast<float>(rng() % 9) / 4 - 1;
    if (!chance(4)) row.presence = static_cast<float>(rng() % 9) / 4 - 1;
    if (!chance(3)) row.repetition = 0.5f + static_cast<float>(rng() % 9) / 8;
  }
  if (chance(3)) {
    const int n = static_cast<int>(rng() % 12);
    for (int j = 0; j < n; ++j) {
      // Sometimes the same token again.
      const int32_t at = j > 0 && chance(5) ? row.bias[rng() % j].first : token();
      row.bias.push_back({at, chance(4) ? -kInf : static_cast<float>(rng() % 801) / 100 - 4});
    }
  }
  if (chance(3)) {
    // Many tokens, few, one or none.
    row.mask.resize(mask_words(vocab));
    const unsigned kind = rng() % 4;
    for (uint32_t& word : row.mask) word = kind == 0 ? rng() : kind == 1 ? rng() & rng() & rng() & rng() & rng() : 0;
    if (kind == 2 || chance(2)) {
      const int32_t at = token();
      row.mask[at / 32] |= 1u << (at % 32);
    }
  }
  if (chance(3)) {
    for (unsigned j = rng() % 7; j > 0; --j) row.ids.push_back(token());
  }
  return row;
}

void test_random(Rng& rng, int vocab, int rows, int block) {
  Case c;
  c.name = "random";
  for (int i = 0; i < rows; ++i)
    c.add(some_row(rng, vocab, i), static_cast<int32_t>(rng() % 40000),
          some_logits(rng, vocab, static_cast<int>(rng() % 24)));
  compare(c, block);
}

// Every token of the vocabulary is listed; limits fall within ties and at the ends.
void test_edges(Rng& rng, int vocab) {
  Case c;
  c.name = "edges";
  for (int kind = 0; kind < 12; ++kind) {
    const auto z = some_logits(rng, vocab, kind);
    c.add({.top = vocab, .temperature = 0}, 1, z);
    c.add({.top_k = vocab - 1, .top = std::min(vocab, 2048), .flags = 5, .seed = rng()}, 2, z);
    c.add(
        {.top_k = 2, .top = std::min(vocab, 2049), .flags = 7, .temperature = 0.5f, .seed = rng(), .bias = {{0, 9.0f}}},
        3, z);
    c.add({.flags = 4, .top_p = 0.0f, .seed = rng()}, 4, z);
    c.add({.top_p = 0.99999994f, .seed = rng()}, 5, z);
    c.add({.top_k = vocab / 2 + 1, .flags = 5, .top_p = 0.5f, .min_p = 1.0f, .seed = rng()}, 6, z);
    c.add({.top_p = 0.5f, .seed = rng()}, 2147483647, z);
  }
  compare(c, 32);
}

// One bin has more tokens than the sort takes, and limits fall among them: a limit that is slightly off keeps some
// tokens that one of many draws then takes.
void test_crowded(Rng& rng, int draws) {
  const int vocab = 20000;
  for (const float width : {0.0f, 1e-4f, 0.012f, 0.05f}) {
    std::vector<float> z(vocab);
    for (float& x : z) x = 2.0f + width * static_cast<float>(rng() >> 8) * 0x1p-24f;
    // A limit between two bins of 1/64.
    const float max = *std::max_element(z.begin(), z.end());
    const auto upper = std::count_if(z.begin(), z.end(), [max](float x) { return (max - x) * 64.0f < 2.0f; });
    for (const Row& prototype : {Row{.top_k = 10000}, Row{.top_k = static_cast<int>(upper)}, Row{.top_p = 0.5f},
                                 Row{.top_k = 9000, .flags = 5, .top_p = 0.7f}}) {
      Case c;
      c.name = "crowded";
      for (int i = 0; i < draws; ++i) {
        Row row = prototype;
        row.seed = rng();
        c.add(row, i, z);
      }
      compare(c, 128);
    }
  }
}

// Draws follow the distribution: chi-square over positions, with the top-p renormalisation that the mask implies.
void test_distribution(Rng& rng) {
  const int vocab = 23, draws = 20000;
  const auto z = some_logits(rng, vocab, 0);
  BatchBuilder b;
  std::vector<int32_t> positions;
  std::vector<std::vector<float>> logits;
  for (int i = 0; i < draws; ++i) {
    b.row({.flags = 0, .temperature = 2.0f, .seed = 7});
    positions.push_back(i), logits.push_back(z);
  }
  const StepResult r = on_gpu(b.view(), positions, logits, 1000);
  std::vector<double> p(vocab), count(vocab, 0);
  double sum = 0, chi = 0;
  for (int i = 0; i < vocab; ++i) sum += p[i] = std::exp(z[i] / 2.0);
  for (const int t : r.tokens) ++count[t];
  for (int i = 0; i < vocab; ++i) {
    const double e = draws * p[i] / sum;
    chi += (count[i] - e) * (count[i] - e) / e;
  }
  // 22 degrees of freedom: above 54 once in 5,000. The seed is fixed, so the result never changes.
  CHECKF(chi < 54, "chi-square %g", chi);
}

void bench(Rng& rng) {
  const int vocab = 151936, rows = 64;
  const auto base = some_logits(rng, vocab, 0);
  const auto time = [&](const char* name, const Row& prototype, int count) {
    BatchBuilder b;
    std::vector<int32_t> positions(count, 5);
    for (int i = 0; i < count; ++i) {
      Row row = prototype;
      row.seed = 1000u + i;
      b.row(row);
    }
    const StepBatch batch = b.view();
    const GpuBatch on(batch, positions, vocab);
    const auto offsets = GpuBatch::tops(batch);
    Gpu<int32_t> tokens(count), top_ids(offsets.back()), kept_counts(count), kept(GpuBatch::kept(batch, vocab).back());
    Gpu<float> logprobs(count), top_logprobs(offsets.back()), ids(batch.ids.size()), z(size_t{rows} * vocab);
    Gpu<float> kept_logprobs(count);
    Gpu<uint8_t> scratch(cuda::sampler_scratch_bytes(rows, vocab));
    for (int i = 0; i < rows; ++i)
      check(cudaMemcpy(z.get() + size_t{1} * i * vocab, base.data(), vocab * 4, cudaMemcpyHostToDevice), "logits");
    const cuda::SampleOutput out{tokens.get(), logprobs.get(),    top_ids.get(),       top_logprobs.get(),
                                 ids.get(),    kept_counts.get(), kept_logprobs.get(), kept.get()};
    cudaEvent_t start, stop;
    check(cudaEventCreate(&start), "event"), check(cudaEventCreate(&stop), "event");
    const int repeats = 50;
    for (int i = -5; i < repeats; ++i) {
      if (i == 0) check(cudaEventRecord(start), "record");
      cuda::sample(z.get(), vocab, vocab, on.rows(), 0, count, cuda::sample_traits(batch, vocab), out, scratch.get(),
                   nullptr);
    }
    check(cudaEventRecord(stop), "record");
    check(cudaEventSynchronize(stop), "wait");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "elapsed");
    const double us = ms * 1e3 / repeats;
    std::printf("sampler %-28s %3d rows x %d: %7.1f us, %6.0f GB/s of logits\n", name, count, vocab, us,
                4e-3 * count * vocab / us);
  };
  for (const int count : {1, 64}) {
    time("greedy", {.flags = 0, .temperature = 0}, count);
    time("greedy, logprob", {.temperature = 0}, count);
    time("temperature 1, logprob", {.temperature = 1}, count);
    time("temperature 0.7, logprob", {.temperature = 0.7f}, count);
    time("raw logprob", {.flags = 3, .temperature = 0.7f}, count);
    time("top_p 0.9", {.temperature = 1, .top_p = 0.9f}, count);
    time("top_k 50", {.top_k = 50, .temperature = 1}, count);
    time("top_k 50, top_p 0.9", {.top_k = 50, .temperature = 1, .top_p = 0.9f}, count);
    const std::vector<uint32_t> half(mask_words(vocab), 0x55555555);
    time("half of the tokens masked", {.temperature = 1, .mask = half}, count);
    time("top_k 50, top_p 0.9, kept set", {.top_k = 50, .flags = 5, .temperature = 1, .top_p = 0.9f}, count);
    time("top_p 0.9, kept set", {.flags = 5, .temperature = 1, .top_p = 0.9f}, count);
    time("20 top logprobs", {.top = 20, .temperature = 1}, count);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, benchmark = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--bench") == 0) {
      benchmark = true;
    } else {
      seed = static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10));
    }
  }
  std::printf("sampler_test: seed %u\n", seed);
  Rng rng(seed);
  test_edges(rng, 7);
  test_random(rng, 7, quick ? 12 : 700, quick ? 5 : 64);
  test_random(rng, 320, quick ? 12 : 700, quick ? 12 : 50);
  test_random(rng, 1, 12, 3);
  if (quick) {
    test_random(rng, 9000, 12, 4);
  } else {
    test_edges(rng, 320);
    test_edges(rng, 5000);
    test_crowded(rng, 300);
    test_distribution(rng);
    test_random(rng, 8192, 60, 60);
    test_random(rng, 8193, 60, 17);
    for (int i = 0; i < 3; ++i) test_random(rng, 50257, 60, 23);
    for (int i = 0; i < 3; ++i) test_random(rng, 151936, 60, 64);
    CHECKF(differing * 500 < drawn, "%ld of %ld rows differ within rounding", differing, drawn);
  }
  std::printf("sampler_test: %ld rows, %ld differ within rounding\n", drawn, differing);
  if (benchmark) bench(rng);
  return finish("sampler_test");
}
