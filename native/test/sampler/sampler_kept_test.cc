// Kept sets (kRowWantKept) against their definition in double precision. Build as forward_test.cc.
#include "test/check.h"
#include "test/sampler/sampler_reference.h"

using namespace refit;
using namespace refit::test;

namespace {

// The kept set by its definition, in double precision; empty if a limit is too close to a token to tell.
std::vector<int> brute_kept(const std::vector<float>& z, const Row& row) {
  const auto p = softmax(widen(z, row.temperature));
  const auto order = brute_order(z);
  const int k = row.top_k > 0 ? std::min<int>(row.top_k, static_cast<int>(z.size())) : static_cast<int>(z.size());
  double total = 0, before = 0;
  for (int i = 0; i < k; ++i) total += p[order[i]];
  std::vector<int> kept;
  for (int i = 0; i < k; ++i) {
    const double q = p[order[i]], floor = row.min_p * p[order[0]];
    if (i > 0 && (std::abs(before - row.top_p * total) < 1e-6 || (floor > 0 && std::abs(q - floor) < 1e-6 * q)))
      return {};
    if (i == 0 || ((row.top_p >= 1 || before < row.top_p * total) && q >= floor)) kept.push_back(order[i]);
    before += q;
  }
  return kept;
}

void test_kept() {
  std::mt19937 rng(6);
  int checked = 0;
  for (int round = 0; round < 2000; ++round) {
    const int n = 1 + static_cast<int>(rng() % 200);
    const auto z = random_logits(rng, n, 1 + rng() % 3, rng() % 2 == 0);
    Row row{.flags = kRowWantKept, .temperature = 0.5f + static_cast<float>(rng() % 5) / 4, .seed = rng()};
    if (rng() % 2 == 0) row.top_k = 2 + static_cast<int>(rng() % (n + 3));
    if (rng() % 2 == 0) row.top_p = static_cast<float>(1 + rng() % 1000) / 1000;
    if (rng() % 3 == 0) row.min_p = static_cast<float>(rng() % 100) / 200;
    const StepResult r = sample(z, row);
    const auto expected = brute_kept(z, row);
    if (expected.empty()) continue;
    ++checked;
    const bool equal = std::equal(r.kept_ids.begin(), r.kept_ids.end(), expected.begin(), expected.end());
    CHECKF(equal && r.kept_counts[0] == static_cast<int>(expected.size()), "n %d, k %d, top_p %g, min_p %g", n,
           row.top_k, row.top_p, row.min_p);
    const auto p = softmax(widen(z, row.temperature));
    double mass = 0;
    for (const int i : expected) mass += p[i];
    CHECKF(std::abs(r.kept_logprobs[0] - std::log(p[r.tokens[0]] / mass)) < 1e-5, "%g", r.kept_logprobs[0]);
    CHECK(std::count(expected.begin(), expected.end(), r.tokens[0]) == 1);
  }
  CHECKF(checked > 1500, "only %d", checked);
  for (const Row& row : {Row{.flags = kRowWantKept, .temperature = 0}, Row{.top_k = 1, .flags = kRowWantKept}}) {
    const StepResult r = sample({1, 5, 5, 2}, row);
    CHECK(r.kept_ids == std::vector<int32_t>{1} && r.kept_counts[0] == 1 && r.kept_logprobs[0] == 0.0f);
  }
  // Penalties and bias come first; raw logprobs do not change the set.
  const Row biased{.top_k = 3, .flags = 7, .bias = {{1, -kInf}, {3, 9.0f}}};
  CHECK(sample({1, 5, 5, 2}, biased).kept_ids == (std::vector<int32_t>{3, 2, 0}));
  // A set that is too large is only counted. Other rows have none.
  const StepResult large = sample(std::vector<float>(kMostKept + 1, 1.0f), {.flags = kRowWantKept});
  CHECK(large.kept_counts[0] == kMostKept + 1 && large.kept_ids.empty());
  CHECK(sample({1, 2}, {.target = 1, .flags = kRowWantKept}).kept_counts.empty() && sample({1}, {}).kept_ids.empty());
}

}  // namespace

int main() {
  test_kept();
  return finish("sampler_kept_test");
}
