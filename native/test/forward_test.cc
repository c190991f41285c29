// The forward pass against a reference in double precision, and its bitwise invariants. By hand:
//   for f in core/*.cc cpu/*.cc: g++ -std=c++20 -O2 -I. <flags of cpu/sources.cmake> -c; then link with
//   test/forward_test.cc
#include <stdexcept>

#include "cpu/kernels.h"
#include "test/check.h"
#include "test/forward_reference.h"

using namespace refit;
using namespace refit::test;

namespace {

const std::vector<Variant> kVariants = {
    {"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false},
    {"llama, o bias, scaled rope", 48, 2, 4, 4, 12, 80, 64, true, true, false, false, 0, 0, 0, true, {}, 1.3},
    {"qwen2, tied", 64, 2, 8, 2, 8, 128, 97, true, false, false, true},
    {"qwen3, wide heads", 40, 3, 4, 2, 32, 64, 130, false, false, true, true},
    {"one kv head", 64, 1, 8, 1, 24, 64, 50, false, false, true, false},
    {"qwen3 moe", 64, 3, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0, 1}},
    {"qwen3 moe, no renorm", 32, 2, 4, 4, 16, 64, 90, false, false, true, true, 5, 3, 24, false, {1, 1}},
    {"olmo2", 64, 2, 8, 2, 16, 96, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
    {"olmo2, biases, one kv head", 48, 2, 4, 1, 12, 80, 64, true, true, true, true, 0, 0, 0, true, {}, 1.0, true},
    {"gelu", 64,    2, 4, 2, 16,   96, 101, false, false,
     false,  false, 0, 0, 0, true, {}, 1.0, false, Activation::kGeluTanh},
    {"gelu moe", 64,    2, 4, 2,  16,   96,     90,  false, false,
     true,       false, 8, 2, 32, true, {1, 1}, 1.0, false, Activation::kGeluTanh},
};

// More than two blocks of keys (64) and one item of rows (96), with a last block that is not full.
constexpr int kTokens = 131;

using Logprobs = std::vector<std::vector<float>>;

std::vector<int32_t> random_tokens(std::mt19937& rng, int n, int vocab) {
  std::vector<int32_t> t(n);
  for (int32_t& x : t) x = static_cast<int32_t>(rng() % vocab);
  return t;
}

struct Sequence {
  std::vector<int32_t> tokens, pages;
};

std::vector<int32_t> some_pages(std::vector<int32_t>& free, int tokens, int page_size) {
  std::vector<int32_t> out;
  for (int i = 0; i < (tokens + page_size - 1) / page_size; ++i) {
    out.push_back(free.back());
    free.pop_back();
  }
  return out;
}

std::vector<int32_t> page_list(int pages, std::mt19937* shuffle) {
  std::vector<int32_t> p(pages);
  for (int i = 0; i < pages; ++i) p[i] = pages - 1 - i;
  if (shuffle != nullptr) std::shuffle(p.begin(), p.end(), *shuffle);
  return p;
}

// The raw log-softmax of every token of the batch, by token id, and then the experts that it was routed to.
Logprobs all_logprobs(Device& device, BatchBuilder& b, int vocab) {
  for (size_t t = 0; t < b.tokens.size(); ++t) {
    BatchBuilder::Row row{
        .token = static_cast<int32_t>(t), .top = vocab, .flags = kRowWantLogprob | kRowRawLogprob, .temperature = 0};
    row.target = b.tokens[t];
    b.row(row);
  }
  const StepResult result = b.run(device);
  Logprobs out(b.tokens.size(), std::vector<float>(vocab));
  const size_t recorded = result.experts.size() / std::max<size_t>(1, out.size());
  CHECK(result.experts.size() == recorded * out.size());
  for (size_t t = 0; t < out.size(); ++t) {
    for (int i = 0; i < vocab; ++i) out[t][result.top_ids[t * vocab + i]] = result.top_logprobs[t * vocab + i];
    const float own = out[t][b.tokens[t]];
    CHECK(result.logprobs[t] == own || (std::isnan(result.logprobs[t]) && std::isnan(own)));
    const auto experts = result.experts.begin() + static_cast<int64_t>(t * recorded);
    out[t].insert(out[t].end(), experts, experts + static_cast<int64_t>(recorded));
  }
  return out;
}

Logprobs whole(Device& device, const Sequence& s, int vocab) {
  BatchBuilder b;
  b.sequence(s.tokens, 0, s.pages);
  return all_logprobs(device, b, vocab);
}

bool same(const Logprobs& a, const Logprobs& b) { return a == b; }

double worst(const Logprobs& got, const std::vector<std::vector<double>>& logits) {
  double error = 0, scale = 0;
  for (size_t t = 0; t < got.size(); ++t) {
    double max = -1e300, sum = 0;
    for (const double z : logits[t]) max = std::max(max, z), scale = std::max(scale, std::abs(z));
    for (const double z : logits[t]) sum += std::exp(z - max);
    for (size_t i = 0; i < logits[t].size(); ++i) {
      const double e = std::abs(got[t][i] - (logits[t][i] - max - std::log(sum)));
      if (!(e <= error)) error = e;  // a NaN stays
    }
  }
  return error / scale;
}

void compare(const TestModel& model, const Sequence& s, const std::string& isa,
             const std::vector<std::vector<double>>& expected, const std::vector<std::vector<int>>& routed) {
  const Variant& v = model.v;
  std::mt19937 rng(7);
  for (const int ranks : {1, 2, 4}) {
    const int page_size = ranks == 1 ? 16 : ranks == 2 ? 5 : 1;
    auto device = model.device(ranks, 2, isa, 200, page_size);
    auto free = page_list(200, &rng);
    const Logprobs got = whole(*device, {s.tokens, some_pages(free, kTokens, page_size)}, v.vocab);
    const double error = worst(got, expected);
    // bf16 keeps 8 bits and fp16 11, and there are a few dozen roundings between a token and its logits. A router near
    // a tie may choose another expert.
    const double of_16_bits = model.dtype == DType::kBFloat16 ? 0.06 : 0.0075;
    const double bound = model.dtype == DType::kFloat32 ? 1e-5 : v.experts > 0 ? 0.3 : of_16_bits;
    CHECKF(error <= bound, "%s, %s, dtype %d, %d ranks: error %g", v.name, isa.c_str(), static_cast<int>(model.dtype),
           ranks, error);
    // In 16 bits a router near a tie may choose another expert.
    for (size_t t = 0; model.dtype == DType::kFloat32 && t < routed.size(); ++t) {
      const std::vector<int> experts(got[t].begin() + v.vocab, got[t].end());
      if (!CHECKF(experts == routed[t], "%s, %s, %d ranks: other experts at token %zu", v.name, isa.c_str(), ranks, t))
        break;
    }
  }
}

// The reference takes longer than the kernels, so all instruction sets are compared with one result.
void test_reference(const Variant& v) {
  std::mt19937 rng(7);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const TestModel model(v, dtype, 11);
    const Sequence s{random_tokens(rng, kTokens, v.vocab), {}};
    std::vector<std::vector<int>> routed;
    const auto expected = model.logits(s.tokens, &routed);
    for (const std::string& isa : cpu::isas()) compare(model, s, isa, expected, routed);
  }
}

void test_invariants(const Variant& v, const std::string& isa, DType dtype, int ranks, int page_size) {
  std::mt19937 rng(3);
  const int pages = 700 / page_size + 8, n = kTokens;
  const TestModel model(v, dtype, 5);
  const std::vector<int32_t> tokens = random_tokens(rng, n, v.vocab);
  const auto where = [&](const char* what) {
    return std::string(v.name) + ", " + isa + ", dtype " + std::to_string(static_cast<int>(dtype)) + ", ranks " +
           std::to_string(ranks) + ": " + what;
  };
  Logprobs first;
  for (const int threads : {1, 2, 3}) {
    auto device = model.device(ranks, threads, isa, pages, page_size);
    auto free = page_list(pages, nullptr);
    const Sequence s{tokens, some_pages(free, n, page_size)};
    const Logprobs got = whole(*device, s, v.vocab);
    if (threads == 1) first = got;
    CHECKF(same(got, first), "%s", where("threads change bits").c_str());
  }
  auto device = model.device(ranks, 2, isa, pages, page_size);

  // In chunks, the last ones of single tokens, on shuffled pages that earlier sequences have used.
  for (const int chunk : {1, 7, 64, 65}) {
    auto free = page_list(pages, &rng);
    const auto list = some_pages(free, n, page_size);
    for (int begin = 0; begin < n;) {
      const int end = std::min(n, begin + chunk);
      BatchBuilder b;
      b.sequence({tokens.begin() + begin, tokens.begin() + end}, begin, list);
      const Logprobs got = all_logprobs(*device, b, v.vocab);
      CHECKF(same(got, Logprobs(first.begin() + begin, first.begin() + end)), "%s chunk %d at %d",
             where("chunks change bits").c_str(), chunk, begin);
      begin = end;
    }
  }

  // In a batch with new, continued and decoding sequences. The tested sequence has a prefix (pages of an earlier step)
  // and a tail.
  auto free = page_list(pages, &rng);
  const auto ours = some_pages(free, n, page_size);
  const std::vector<int32_t> other = random_tokens(rng, 130, v.vocab);
  const auto others = some_pages(free, 131, page_size);
  const auto fresh = some_pages(free, 40, page_size);
  BatchBuilder before;
  before.sequence(other, 0, others);
  before.sequence({tokens.begin(), tokens.begin() + 37}, 0, ours);
  const Logprobs a = all_logprobs(*device, before, v.vocab);
  CHECKF(same({a.begin() + 130, a.end()}, {first.begin(), first.begin() + 37}), "%s",
         where("a batch changes bits (prefill)").c_str());
  BatchBuilder then;
  then.sequence(random_tokens(rng, 40, v.vocab), 0, fresh);
  const int at = then.sequence({tokens.begin() + 37, tokens.end()}, 37, ours);
  then.sequence({1}, 130, others);
  const Logprobs c = all_logprobs(*device, then, v.vocab);
  CHECKF(same({c.begin() + at, c.begin() + at + (n - 37)}, {first.begin() + 37, first.end()}), "%s",
         where("a batch changes bits (continued)").c_str());
}

// CoreConfig::deterministic: on any number of ranks a token's logprobs are the same bits. Without it some differ, which
// shows that the comparison can fail.
void test_widths(const Variant& v, const std::string& isa, DType dtype) {
  std::mt19937 rng(13);
  TestModel model(v, dtype, 17);
  const Sequence s{random_tokens(rng, kTokens, v.vocab), page_list(10, nullptr)};
  const auto on = [&](int ranks, bool deterministic) {
    model.deterministic = deterministic;
    return whole(*model.device(ranks, 2, isa, 10, 16), s, v.vocab);
  };
  const Logprobs one = on(1, false);
  CHECKF(same(on(1, true), one), "%s, %s: one rank gives other bits", v.name, isa.c_str());
  for (int ranks = 2; ranks <= 8; ranks *= 2) {
    if (v.heads % ranks != 0 || v.hidden % ranks != 0 || v.expert_inter % ranks != 0) continue;
    CHECKF(same(on(ranks, true), one), "%s, %s, dtype %d: %d ranks give other bits", v.name, isa.c_str(),
           static_cast<int>(dtype), ranks);
    if (dtype != DType::kFloat32) continue;  // in bf16, rounding may hide the order of short sums
    CHECKF(!same(on(ranks, false), one), "%s, %s: sums of %d ranks give the same bits", v.name, isa.c_str(), ranks);
  }
}

// Experts are recorded only on request, also by a step that samples nothing and by one that computes nothing.
void test_recording() {
  TestModel model(kVariants[5], DType::kFloat32, 1);
  BatchBuilder b;
  b.sequence({1, 2, 3}, 0, {0});
  CHECK(b.run(*model.device(1, 1, "", 4, 16)).experts.size() == 3u * 2 * 2);
  CHECK(BatchBuilder().run(*model.device(1, 1, "", 4, 16)).experts.empty());
  model.record = false;
  CHECK(b.run(*model.device(1, 1, "", 4, 16)).experts.empty());
}

// Among experts with equal weights, those with the lowest indices are chosen.
void test_expert_ties() {
  TestModel model(kVariants[5], DType::kFloat32, 1);
  for (const char* router : {"layers.0.router", "layers.2.router"}) {
    for (float& weight : model.weights.at(router).x) weight = 0;
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    model.dtype = dtype;
    BatchBuilder b;
    b.sequence({1, 2, 3}, 0, {0});
    const auto experts = b.run(*model.device(1, 1, "", 4, 16)).experts;
    CHECK(experts.size() == 3u * 2 * 2);
    for (size_t i = 0; i < experts.size(); ++i) CHECKF(experts[i] == i % 2, "choice %zu: expert %d", i, experts[i]);
  }
}

// A later token with an infinite value must not change an earlier one.
void test_causal() {
  Variant v = kVariants[0];
  TestModel model(v, DType::kFloat32, 1);
  std::mt19937 rng(1);
  std::vector<int32_t> tokens = random_tokens(rng, 30, v.vocab - 1);
  for (int32_t& t : tokens) t += 1;
  auto clean_device = model.device(1, 2, "", 8, 16);
  const Logprobs clean = whole(*clean_device, {tokens, {0, 1}}, v.vocab);
  for (int i = 0; i < v.hidden; ++i) model.weights["embed"].x[i] = std::numeric_limits<float>::quiet_NaN();
  auto device = model.device(1, 2, "", 8, 16);
  tokens[20] = 0;
  Logprobs got = whole(*device, {tokens, {0, 1}}, v.vocab);
  // Greedy sampling over NaN logits must not crash: whole() has requested all of them.
  CHECK(same({got.begin(), got.begin() + 20}, {clean.begin(), clean.begin() + 20}));
  CHECK(std::isnan(got[20][3]));
  // The next sequence is not changed by the pages that contained the poison.
  tokens[20] = 1;
  got = whole(*device, {tokens, {0, 1}}, v.vocab);
  const Logprobs again = whole(*clean_device, {tokens, {3, 2}}, v.vocab);
  CHECK(same(got, again));
}

template <class Change>
std::string refusal(Device& device, Change change) {
  BatchBuilder b;
  b.sequence({1, 2, 3}, 0, {0});
  b.sequence({4}, 15, {1, 2});
  b.row({.token = 2});
  b.row({.token = 3, .history = {1, 2}, .bias = {{3, 1.0f}}, .ids = {5}});
  change(b);
  try {
    b.run(device);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

void test_refusals() {
  const TestModel model(kVariants[0], DType::kFloat32, 1);
  auto device = model.device(1, 1, "", 4, 16);
  CHECK(refusal(*device, [](BatchBuilder&) {}).empty());
  const auto refused = [&](const char* part, auto change) {
    const std::string what = refusal(*device, change);
    CHECKF(what.find(part) != std::string::npos, "expected '%s' in '%s'", part, what.c_str());
  };
  refused("tokens[1] = 101 is outside [0, 101)", [](BatchBuilder& b) { b.tokens[1] = 101; });
  refused("tokens[0] = -3", [](BatchBuilder& b) { b.tokens[0] = -3; });  // of a third row of the step before
  refused("seqOffsets has 2 entries, expected 3", [](BatchBuilder& b) { b.seq_offsets.pop_back(); });
  refused("seqOffsets[1] = -3 is below", [](BatchBuilder& b) { b.seq_offsets[1] = -3; });
  refused("seqOffsets ends at 3, but there are 4", [](BatchBuilder& b) { b.seq_offsets[2] = 3; });
  refused("seqOffsets starts at 1", [](BatchBuilder& b) { b.seq_offsets[0] = 1; });
  refused("sequence 1 has no tokens", [](BatchBuilder& b) { b.seq_offsets[1] = 4; });
  refused("sequence 0 starts at position -1", [](BatchBuilder& b) { b.start_pos[0] = -1; });
  refused("sequence 0 holds 1 pages of 16 tokens, but ends at position 17 and needs 2",
          [](BatchBuilder& b) { b.start_pos[0] = 14; });
  refused("needs 134217729", [](BatchBuilder& b) { b.start_pos[0] = 2147483647; });
  refused("pages[2] = 4 is outside [0, 4)", [](BatchBuilder& b) { b.pages[2] = 4; });
  refused("pages[0] = -1", [](BatchBuilder& b) { b.pages[0] = -1; });
  refused("page 1 would be written twice, for sequences 0 and 1", [](BatchBuilder& b) { b.pages[0] = 1; });
  refused("row 0: token index = 4", [](BatchBuilder& b) { b.row_ints[0] = 4; });
  refused("row 1: target = 101", [](BatchBuilder& b) { b.row_ints[8] = 101; });
  refused("row 1: target = -2", [](BatchBuilder& b) { b.row_ints[8] = -2; });
  refused("row 0: top_k = -1", [](BatchBuilder& b) { b.row_ints[2] = -1; });
  refused("row 0: top logprobs = 102", [](BatchBuilder& b) { b.row_ints[3] = 102; });
  refused("row 0: flags = 8", [](BatchBuilder& b) { b.row_ints[4] = 8; });
  refused("row 1: historyPrompt = 3", [](BatchBuilder& b) { b.row_ints[12] = 3; });
  refused("row 0: mask = 0", [](BatchBuilder& b) { b.row_ints[6] = 0; });
  refused("row 1: mask = -2", [](BatchBuilder& b) { b.row_ints[13] = -2; });
  refused("masks has 3 words, expected a multiple of 4", [](BatchBuilder& b) { b.masks.resize(3); });
  refused("row 0: temperature", [](BatchBuilder& b) { b.row_floats[0] = std::nanf(""); });
  refused("row 0: temperature", [](BatchBuilder& b) { b.row_floats[0] = -1; });
  refused("row 0: top_p", [](BatchBuilder& b) { b.row_floats[1] = 1.5f; });
  refused("row 0: min_p", [](BatchBuilder& b) { b.row_floats[2] = -0.1f; });
  refused("row 0: repetition penalty", [](BatchBuilder& b) { b.row_floats[5] = 0; });
  refused("rowInts has 13 entries, expected 14", [](BatchBuilder& b) { b.row_ints.pop_back(); });
  refused("rowFloats has 11 entries", [](BatchBuilder& b) { b.row_floats.pop_back(); });
  refused("historyOffsets", [](BatchBuilder& b) { b.history_offsets.back() = 9; });
  refused("history[0] = 101", [](BatchBuilder& b) { b.history[0] = 101; });
  refused("biasTokens[0] = -7", [](BatchBuilder& b) { b.bias_tokens[0] = -7; });
  refused("biasValues has 0 entries", [](BatchBuilder& b) { b.bias_values.clear(); });
  refused("ids[0] = 500", [](BatchBuilder& b) { b.ids[0] = 500; });
  // A step without sequences is allowed and does nothing.
  CHECK(BatchBuilder().run(*device).tokens.empty());
}

void test_bad_configuration() {
  const TestModel model(kVariants[3], DType::kFloat32, 1);
  const auto refused = [&](const char* part, auto change) {
    CoreConfig c = model.config(1, 1, "", 4, 16);
    change(c);
    std::string what;
    try {
      make_cpu_device(c);
    } catch (const std::invalid_argument& e) {
      what = e.what();
    }
    CHECKF(what.find(part) != std::string::npos, "expected '%s' in '%s'", part, what.c_str());
  };
  const auto param = [](CoreConfig& c, const std::string& name) -> Param& {
    return *std::find_if(c.params.begin(), c.params.end(), [&](const Param& p) { return p.name == name; });
  };
  refused("parameter norm is missing", [&](CoreConfig& c) { param(c, "norm").name = "other"; });
  refused("parameter layers.1.o is [40, 127], expected [40, 128]",
          [&](CoreConfig& c) { param(c, "layers.1.o").cols = 127; });
  refused("listed twice", [&](CoreConfig& c) { c.params.push_back(c.params[0]); });
  refused("threads is 0", [](CoreConfig& c) { c.threads = 0; });
  refused("sets is 3, expected at most 2", [](CoreConfig& c) { c.sets = 3; });
  refused("ranks is 0", [](CoreConfig& c) { c.ranks = 0; });
  refused("pages is 0", [](CoreConfig& c) { c.pages = 0; });
  refused("page_size is -1", [](CoreConfig& c) { c.page_size = -1; });
  refused("do not divide among 3 ranks", [](CoreConfig& c) { c.ranks = 3; });
  refused("rope_inv_freq has 0 entries", [](CoreConfig& c) { c.recipe.rope_inv_freq.clear(); });
  refused("sparse_layers has 1", [](CoreConfig& c) { c.recipe.sparse_layers.resize(1); });
  refused("fewer than the vocabulary", [](CoreConfig& c) { c.recipe.vocab = 1000; });
}

}  // namespace

int main() {
  for (const Variant& v : kVariants) test_reference(v);
  for (const std::string& isa : cpu::isas()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int v : {0, 5}) test_widths(kVariants[v], isa, dtype);
      test_invariants(kVariants[0], isa, dtype, 1, 16);
      test_invariants(kVariants[5], isa, dtype, 2, 7);
    }
  }
  for (const Variant& v : kVariants) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) test_widths(v, "", dtype);
    test_invariants(v, "", DType::kBFloat16, 1, 16);
    test_invariants(v, "", DType::kFloat16, 1, 16);
    test_invariants(v, "", DType::kFloat32, 4, 128);
  }
  test_recording();
  test_expert_ties();
  test_causal();
  test_refusals();
  test_bad_configuration();
  return finish("forward_test");
}
