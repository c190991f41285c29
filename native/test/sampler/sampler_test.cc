// The sampler against brute force in double precision. Build as forward_test.cc.
#include "cpu/sampler/sampler.h"

#include <limits>
#include <set>

#include "core/philox.h"
#include "cpu/kernels.h"
#include "cpu/sampler/sampler_gumbel.h"
#include "cpu/sampler/sampler_mask.h"
#include "test/check.h"
#include "test/sampler/sampler_reference.h"

using namespace refit;
using namespace refit::test;

namespace {

// The known answers of the Random123 distribution (kat_vectors, philox4x32 10).
void test_philox() {
  const auto is = [](PhiloxBlock c, uint32_t k0, uint32_t k1, PhiloxBlock e) {
    const PhiloxBlock got = philox4x32_10(c, k0, k1);
    for (int i = 0; i < 4; ++i) CHECKF(got.x[i] == e.x[i], "word %d: %08x, expected %08x", i, got.x[i], e.x[i]);
  };
  is({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  is({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff,
     {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  is({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
     {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  CHECK(noise_uniform(0) == 0x1p-33f);
  CHECK(noise_uniform(0xffffffff) < 1.0f);
}

// The reference for sample_gumbel: the noise of every token, without a shortcut.
int brute_gumbel(const std::vector<float>& z, const std::vector<float>& prob, float max, uint64_t seed, int position) {
  int best = -1;
  float score = 0;
  for (size_t i = 0; i < z.size(); ++i) {
    if (!(prob[i] > 0)) continue;
    const PhiloxBlock noise = sample_noise(seed, position, static_cast<uint32_t>(i / 4));
    const float s = (z[i] - max) - std::log(-std::log1p(-noise_uniform(noise.x[i % 4])));
    if (best < 0 || s > score) score = s, best = static_cast<int>(i);
  }
  return best;
}

void test_gumbel_shortcut() {
  std::mt19937 rng(1);
  for (int round = 0; round < 3000; ++round) {
    const int n = 1 + static_cast<int>(rng() % 300);
    const auto z = random_logits(rng, n, (rng() % 40) * 0.5, rng() % 2 == 0);
    const float max = *std::max_element(z.begin(), z.end());
    const int top = static_cast<int>(std::max_element(z.begin(), z.end()) - z.begin());
    std::vector<float> prob(n);
    for (int i = 0; i < n; ++i) prob[i] = i == top || rng() % 4 != 0 ? std::exp(z[i] - max) : 0.0f;
    const uint64_t seed = (static_cast<uint64_t>(rng()) << 32) | rng();
    const int position = static_cast<int>(rng() % 10000);
    const int got = cpu::sample_gumbel(z.data(), max, prob.data(), n, top, seed, position);
    CHECK(got == brute_gumbel(z, prob, max, seed, position));
  }
}

// Chi-square of draws at positions 0.. and over seeds: both must follow the distribution.
void test_distribution() {
  std::mt19937 rng(2);
  const int draws = 40000;
  for (const bool by_seed : {false, true}) {
    for (const float temperature : {0.5f, 1.0f, 2.0f}) {
      const auto z = random_logits(rng, 23, 1.5);
      const auto p = softmax(widen(z, temperature));
      std::vector<int> count(z.size(), 0);
      for (int i = 0; i < draws; ++i) {
        ++count[sample(z, {.flags = 0, .temperature = temperature, .seed = by_seed ? 1000u + i : 99u}, by_seed ? 5 : i)
                    .tokens[0]];
      }
      double chi = 0;
      for (size_t i = 0; i < z.size(); ++i)
        chi += (count[i] - draws * p[i]) * (count[i] - draws * p[i]) / (draws * p[i]);
      // 22 degrees of freedom: above 54 once in 5,000. Seeds are fixed, so this passes or fails for good.
      CHECKF(chi < 54, "chi-square %g, temperature %g", chi, temperature);
    }
  }
  // Rare tokens: 4,000 tokens of 2.5e-6 each must together be drawn one time in 100.
  std::vector<float> z(4001, 0.0f);
  z[1234] = static_cast<float>(std::log(99.0 * 4000));
  int rare = 0;
  for (int i = 0; i < 20000; ++i) rare += sample(z, {.flags = 0, .seed = 5}, i).tokens[0] != 1234;
  CHECKF(rare > 140 && rare < 260, "rare tokens: %d of 20000, expected 200", rare);
}

void test_masks() {
  std::mt19937 rng(3);
  std::vector<int32_t> scratch;
  for (int round = 0; round < 2000; ++round) {
    const int n = 1 + static_cast<int>(rng() % 400);
    const auto z = random_logits(rng, n, (rng() % 20) * 0.4, rng() % 2 == 0);
    const float max = *std::max_element(z.begin(), z.end());
    std::vector<float> p(n);
    for (int i = 0; i < n; ++i) p[i] = std::exp(z[i] - max);
    const int k = static_cast<int>(rng() % (n + 5));
    const float top_p = static_cast<float>(rng() % 1001) / 1000, min_p = static_cast<float>(rng() % 100) / 200;

    const auto order = brute_order(z);
    std::set<int> kept(order.begin(), order.begin() + (k == 0 || k > n ? n : k));
    double total = 0, before = 0;
    for (const int i : order) total += kept.count(i) != 0 ? p[i] : 0.0;
    bool near = false;  // a limit that equals a partial sum up to rounding may keep or drop the token
    for (const int i : order) {
      if (kept.count(i) == 0) continue;
      near |= std::abs(before - double{top_p} * total) < 1e-9 * total && before > 0;
      if (top_p < 1 && before >= double{top_p} * total && i != order[0]) kept.erase(i);
      before += p[i];
    }
    for (int i = 0; i < n; ++i) {
      if (p[i] < min_p) kept.erase(i);
    }
    std::vector<float> q = p;
    cpu::keep_top_k(z.data(), q.data(), n, k, scratch);
    cpu::keep_top_p(z.data(), q.data(), n, top_p, scratch);
    cpu::keep_min_p(q.data(), n, min_p);
    if (near) continue;
    bool equal = true;
    for (int i = 0; i < n; ++i) equal &= q[i] == (kept.count(i) != 0 ? p[i] : 0.0f);
    CHECKF(equal, "n %d, k %d, top_p %g, min_p %g", n, k, top_p, min_p);
  }
  // Through the whole sampler: every token of the kept set is drawn, and no other token.
  const std::vector<float> z = {1, 3, 2, 3, 0, 3};
  const auto drawn = [&](Row row) {
    std::set<int> s;
    row.flags = 0;
    for (int i = 0; i < 400; ++i) s.insert(sample(z, row, i).tokens[0]);
    return s;
  };
  CHECK(drawn({.top_k = 2}) == (std::set<int>{1, 3}));
  CHECK(drawn({.top_k = 4}) == (std::set<int>{1, 2, 3, 5}));
  CHECK(drawn({.top_p = 0.3f}) == (std::set<int>{1, 3}));
  CHECK(drawn({.top_p = 0.0f}) == (std::set<int>{1}));
  CHECK(drawn({.min_p = 0.9f}) == (std::set<int>{1, 3, 5}));
  CHECK(drawn({.top_k = 4, .top_p = 0.95f, .bias = {{3, -kInf}}}) == (std::set<int>{0, 1, 2, 5}));
  // Half the temperature squares the ratios: e^-2 of token 2 falls below 0.3, and stays above it at temperature 1.
  CHECK(drawn({.temperature = 1.0f, .min_p = 0.3f}).count(2) == 1);
  CHECK(drawn({.temperature = 0.5f, .min_p = 0.3f}).count(2) == 0);
}

void test_greedy() {
  CHECK(sample({1, 5, 5, 2}, {.temperature = 0}).tokens[0] == 1);
  CHECK(sample({-0.0f, 0.0f}, {.temperature = 0}).tokens[0] == 0);
  for (int i = 0; i < 50; ++i) CHECK(sample({1, 5, 5, 2}, {.top_k = 1, .temperature = 3}, i).tokens[0] == 1);
  // Temperature 0 returns logprobs of temperature 1. top_k 1 returns logprobs of the set temperature.
  const std::vector<float> z = {1, 5, 4, 2};
  CHECK(std::abs(sample(z, {.temperature = 0}).logprobs[0] - std::log(softmax(widen(z))[1])) < 1e-6);
  CHECK(std::abs(sample(z, {.top_k = 1, .temperature = 3}).logprobs[0] - std::log(softmax(widen(z, 3))[1])) < 1e-6);
}

void test_logprobs(const std::string& isa) {
  std::mt19937 rng(4);
  const int n = 5001;
  const auto z = random_logits(rng, n, 3, true);  // with ties
  std::vector<int32_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  const Row row{.top_k = 50, .top = 40, .temperature = 0.7f, .top_p = 0.9f, .seed = 3, .ids = ids};
  const StepResult r = sample(z, row, 7, isa);
  const auto p = softmax(widen(z, 0.7f));
  double sum = 0, error = 0;
  for (int i = 0; i < n; ++i) {
    sum += std::exp(static_cast<double>(r.id_logprobs[i]));
    error = std::max(error, std::abs(r.id_logprobs[i] - std::log(p[i])));
  }
  CHECKF(std::abs(sum - 1) < 2e-6 && error < 1e-5, "%s: sum %g, error %g", isa.c_str(), sum, error);
  CHECK(r.logprobs[0] == r.id_logprobs[r.tokens[0]]);
  const auto order = brute_order(z);
  for (int i = 0; i < 40; ++i) CHECK(r.top_ids[i] == order[i] && r.top_logprobs[i] == r.id_logprobs[order[i]]);

  // Raw logprobs: the same token, with logprobs of the unchanged logits.
  Row raw = row;
  raw.flags |= kRowRawLogprob;
  raw.history = {3, 3, 9};
  raw.repetition = 2;
  raw.bias = {{5, 4.0f}};
  Row processed = raw;
  processed.flags = kRowWantLogprob;
  const StepResult a = sample(z, raw, 7, isa), b = sample(z, processed, 7, isa);
  CHECK(a.tokens == b.tokens);
  CHECK(a.id_logprobs[5] != b.id_logprobs[5]);
  const auto q = softmax(widen(z));
  for (int i = 0; i < n; i += 7) CHECK(std::abs(a.id_logprobs[i] - std::log(q[i])) < 1e-5);
  // Without the flag there is no logprob, but the lists are returned. A target is scored, not sampled.
  Row silent = row;
  silent.flags = 0;
  const StepResult s = sample(z, silent, 7, isa);
  CHECK(std::isnan(s.logprobs[0]) && s.id_logprobs == r.id_logprobs && s.top_ids == r.top_ids && s.tokens == r.tokens);
  Row target = row;
  target.target = 17;
  const StepResult t = sample(z, target, 7, isa);
  CHECK(t.tokens[0] == 17 && t.logprobs[0] == r.id_logprobs[17]);
}

void test_penalties() {
  std::vector<int32_t> ids(6);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> z = {2, -2, 1, 0.5f, -1, 3};
  // Prompt 0 1 0, generated 2 1 2: repetition touches 0 1 2; frequency and presence 1 (once) and 2 (twice).
  Row row{.history_prompt = 3,
          .temperature = 0.5f,
          .frequency = 0.25f,
          .presence = 0.5f,
          .repetition = 1.5f,
          .history = {0, 1, 0, 2, 1, 2},
          .ids = ids};
  row.bias = {{3, 2.0f}, {3, 0.5f}, {5, -kInf}};
  const std::vector<double> expected =
      softmax({2 / 1.5 / 0.5, (-2 * 1.5 - 0.25 - 0.5) / 0.5, (1 / 1.5 - 0.5 - 0.5) / 0.5, 3 / 0.5, -1 / 0.5, -1e300});
  const StepResult r = sample(z, row);
  for (int i = 0; i < 5; ++i)
    CHECKF(std::abs(r.id_logprobs[i] - std::log(expected[i])) < 1e-5, "token %d: %g", i, r.id_logprobs[i]);
  CHECK(r.id_logprobs[5] == -kInf);
  // The counts are cleared: rows of one thread do not see each other's history.
  BatchBuilder b;
  b.row(row);
  Row plain{.ids = ids};
  b.row(plain);
  b.row(row);
  cpu::Sampler sampler(cpu::kernels(""), 6, 1);
  StepResult result;
  const StepBatch batch = b.view();
  sampler.begin(batch, result);
  for (int i = 0; i < 3; ++i) {
    std::vector<float> copy = z;
    sampler.row(i, 7, copy.data(), 0);
  }
  const StepResult alone = sample(z, plain);
  CHECK(std::vector<float>(result.id_logprobs.begin() + 6, result.id_logprobs.begin() + 12) == alone.id_logprobs);
  for (int i = 0; i < 6; ++i)
    CHECK(result.id_logprobs[i] == r.id_logprobs[i] && result.id_logprobs[12 + i] == r.id_logprobs[i]);
}

// A mask equals a bias of -infinity on the tokens that it does not allow, with every other field; raw logprobs stay.
void test_allowed() {
  std::mt19937 rng(6);
  for (int round = 0; round < 600; ++round) {
    const int n = 1 + static_cast<int>(rng() % 300);
    auto z = random_logits(rng, n, 2, rng() % 2 == 0);
    Row masked{.flags = static_cast<int>(rng() % 4), .seed = rng()};
    masked.temperature = rng() % 4 == 0 ? 0.0f : 0.8f;
    if (rng() % 2 == 0) masked.top_k = static_cast<int>(rng() % (n + 2));
    if (rng() % 2 == 0) masked.top_p = static_cast<float>(rng() % 1001) / 1000;
    if (rng() % 2 == 0) masked.top = std::min(n, 5);
    for (int i = 0; i < n; i += 7) masked.ids.push_back(i);
    if (rng() % 2 == 0) masked.history = {0, n / 2}, masked.repetition = 1.3f;
    if (rng() % 2 == 0) masked.bias = {{n / 2, 1.5f}};
    masked.mask.assign(mask_words(n), 0);
    Row banned = masked;
    banned.mask.clear();
    const int only = rng() % 8 == 0 ? static_cast<int>(rng() % n) : -1;
    const int forced = static_cast<int>(rng() % n);
    for (int i = 0; i < n; ++i) {
      if (only >= 0 ? i == only : i == forced || rng() % 3 == 0) {
        masked.mask[i / 32] |= 1u << (i % 32);
      } else {
        banned.bias.push_back({i, -kInf});
      }
    }
    const StepResult a = sample(z, masked), b = sample(z, banned);
    const int token = a.tokens[0];
    CHECK((masked.mask[token / 32] >> (token % 32) & 1) == 1 && (only < 0 || token == only));
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      bool equal = x.size() == y.size();
      for (size_t i = 0; equal && i < x.size(); ++i) equal = x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]));
      return equal;
    };
    CHECK(a.tokens == b.tokens && same(a.logprobs, b.logprobs) && same(a.id_logprobs, b.id_logprobs));
    CHECK(a.top_ids == b.top_ids && same(a.top_logprobs, b.top_logprobs));
  }
  // Bits behind the vocabulary have no effect, and a NaN that is not allowed does not spoil the row.
  const StepResult r = sample({kNaN, 3, 1, 2}, {.top = 3, .temperature = 0, .mask = {0xfffffffc}});
  CHECK(r.tokens[0] == 3 && r.top_ids == (std::vector<int32_t>{3, 2, 0}) && std::isfinite(r.logprobs[0]));
}

void test_poison() {
  for (const Row& row : {Row{.top = 2, .temperature = 0, .ids = {0, 1}},
                         Row{.top_k = 2, .top = 2, .top_p = 0.5f, .min_p = 0.1f, .ids = {0, 1}}}) {
    StepResult r = sample({kNaN, 1, 3, kNaN, 3}, row);
    CHECK(r.tokens[0] == 2 && std::isnan(r.logprobs[0]) && std::isnan(r.id_logprobs[1]) && r.top_ids[0] == 2);
    CHECK(sample(std::vector<float>(5, kNaN), row).tokens[0] == 0);
    r = sample({-kInf, -kInf}, row);
    CHECK(r.tokens[0] == 0 && std::isnan(r.logprobs[0]));
    r = sample({0, kInf, kInf}, row);
    CHECK(r.tokens[0] == 1 && std::isnan(r.logprobs[0]));
    r = sample({0, -kInf, 9}, row);
    CHECK(r.tokens[0] == 2 && r.id_logprobs[1] == -kInf && std::isfinite(r.logprobs[0]));
  }
  // Everything but one token banned.
  Row only;
  for (int i = 0; i < 8; ++i) {
    if (i != 5) only.bias.push_back({i, -kInf});
  }
  for (int i = 0; i < 100; ++i) CHECK(sample(std::vector<float>(8, 1.0f), only, i).tokens[0] == 5);
}

// The whole device: tokens and logprobs do not depend on batch, threads or ranks (float32, so ranks differ by rounding
// only).
void test_device() {
  const Variant v{"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false};
  const TestModel model(v, DType::kFloat32, 9);
  std::vector<StepResult> alone;
  const auto add = [&](BatchBuilder& b, int i) {
    std::vector<int32_t> prompt(5 + i);
    for (int j = 0; j < 5 + i; ++j) prompt[j] = (i * 31 + j * 7) % v.vocab;
    const int32_t first = b.sequence(prompt, 0, {i});
    b.row({.token = first + 4 + i,
           .top = i % 3,
           .temperature = 1.5f,
           .top_p = 0.95f,
           .seed = 40u + i % 2,
           .ids = {1, 2}});
  };
  auto device = model.device(1, 1, "", 16, 16);
  for (int i = 0; i < 10; ++i) {
    BatchBuilder b;
    add(b, i);
    alone.push_back(b.run(*device));
  }
  for (const auto& [ranks, threads] : {std::pair{1, 1}, {1, 2}, {1, 3}, {2, 2}, {4, 2}}) {
    auto other = model.device(ranks, threads, "", 16, 16);
    BatchBuilder b;
    for (int i = 0; i < 10; ++i) add(b, i);
    const StepResult r = b.run(*other);
    size_t top = 0;
    for (int i = 0; i < 10; ++i) {
      CHECK(r.tokens[i] == alone[i].tokens[0]);
      CHECK(ranks == 1 ? r.logprobs[i] == alone[i].logprobs[0] : std::abs(r.logprobs[i] - alone[i].logprobs[0]) < 1e-4);
      for (const int32_t id : alone[i].top_ids) CHECK(r.top_ids[top++] == id);
    }
    CHECK(top == r.top_ids.size() && r.id_logprobs.size() == 20);
  }
}

}  // namespace

int main() {
  test_philox();
  test_gumbel_shortcut();
  test_distribution();
  test_masks();
  test_greedy();
  for (const std::string& isa : cpu::isas()) test_logprobs(isa);
  test_penalties();
  test_allowed();
  test_poison();
  test_device();
  return finish("sampler_test");
}
