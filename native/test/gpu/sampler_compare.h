// One batch through the GPU's sampler and the CPU's, compared row by row. For sampler_test.cc.
#pragma once
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/philox.h"
#include "cpu/kernels.h"
#include "cpu/sampler/sampler.h"
#include "cpu/sampler/sampler_penalty.h"
#include "cuda/device/check.h"
#include "cuda/sampler/sampler.h"
#include "test/check.h"
#include "test/forward_reference.h"

using namespace refit;
using namespace refit::test;
using cuda::check;

namespace {

using Row = BatchBuilder::Row;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kPoison = 0x7fdeadbe;  // a NaN
constexpr int kGuard = 64;                // words behind every result

// An array on the GPU with guard words behind it.
template <class T>
class Gpu {
 public:
  Gpu() = default;
  explicit Gpu(const std::vector<T>& from) : Gpu(from.size()) {
    if (size_ > 0) check(cudaMemcpy(data_, from.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  explicit Gpu(size_t size) : size_(size) {
    check(cudaMalloc(&data_, size * sizeof(T) + kGuard * 4), "cudaMalloc");
    const std::vector<uint32_t> poison((size * sizeof(T) + kGuard * 4) / 4, kPoison);
    check(cudaMemcpy(data_, poison.data(), poison.size() * 4, cudaMemcpyHostToDevice), "copy");
  }
  ~Gpu() { cudaFree(data_); }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  T* get() const { return data_; }
  // The contents; the guards must be intact.
  std::vector<T> read(const char* name) const {
    std::vector<uint8_t> bytes(size_ * sizeof(T) + kGuard * 4);
    check(cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost), "copy back");
    uint32_t guards[kGuard];
    std::memcpy(guards, bytes.data() + size_ * sizeof(T), sizeof guards);
    for (int i = 0; i < kGuard; ++i) {
      if (!CHECKF(guards[i] == kPoison, "%s: guard word %d of %zu entries is %08x", name, i, size_, guards[i])) break;
    }
    std::vector<T> out(size_);
    if (size_ > 0) std::memcpy(out.data(), bytes.data(), size_ * sizeof(T));
    return out;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

template <class T>
std::vector<T> vec(std::span<const T> s) {
  return {s.begin(), s.end()};
}

// Rows of the batch on the GPU.
struct GpuBatch {
  GpuBatch(const StepBatch& b, const std::vector<int32_t>& at, int vocab)
      : ints(vec(b.row_ints)),
        history_offsets(vec(b.history_offsets)),
        history(vec(b.history)),
        bias_offsets(vec(b.bias_offsets)),
        bias_tokens(vec(b.bias_tokens)),
        id_offsets(vec(b.id_offsets)),
        ids(vec(b.ids)),
        positions(at),
        top_offsets(tops(b)),
        kept_offsets(kept(b, vocab)),
        masks(vec(b.masks)),
        floats(vec(b.row_floats)),
        bias_values(vec(b.bias_values)),
        saved_history(b.history.size()),
        saved_bias(b.bias_tokens.size()),
        seeds(vec(b.row_seeds)) {}
  static std::vector<int32_t> tops(const StepBatch& b) {
    std::vector<int32_t> offsets{0};
    for (int r = 0; r < b.rows(); ++r) offsets.push_back(offsets.back() + b.row_ints[r * kRowInts + 3]);
    return offsets;
  }
  static std::vector<int32_t> kept(const StepBatch& b, int vocab) {
    std::vector<int32_t> offsets{0};
    for (int r = 0; r < b.rows(); ++r) offsets.push_back(offsets.back() + kept_room(b, r, vocab));
    return offsets;
  }
  cuda::SampleRows rows() const {
    return {ints.get(),      floats.get(),       seeds.get(),       positions.get(),    history_offsets.get(),
            history.get(),   bias_offsets.get(), bias_tokens.get(), bias_values.get(),  id_offsets.get(),
            ids.get(),       masks.get(),        top_offsets.get(), kept_offsets.get(), saved_history.get(),
            saved_bias.get()};
  }
  Gpu<int32_t> ints, history_offsets, history, bias_offsets, bias_tokens, id_offsets, ids, positions, top_offsets,
      kept_offsets;
  Gpu<uint32_t> masks;
  Gpu<float> floats, bias_values, saved_history, saved_bias;
  Gpu<uint64_t> seeds;
};

// Runs in blocks of `block` rows. Padding of the logits is poison.
StepResult on_gpu(const StepBatch& batch, const std::vector<int32_t>& positions,
                  const std::vector<std::vector<float>>& logits, int block) {
  const int rows = batch.rows(), vocab = static_cast<int>(logits[0].size());
  const int64_t ld = (vocab + 3) / 4 * 4 + 4;
  const GpuBatch on(batch, positions, vocab);
  const auto offsets = GpuBatch::tops(batch), kept_offsets = GpuBatch::kept(batch, vocab);
  Gpu<int32_t> tokens(rows), top_ids(offsets.back()), kept_counts(rows), kept_ids(kept_offsets.back());
  Gpu<float> logprobs(rows), top_logprobs(offsets.back()), id_logprobs(batch.ids.size()), kept_logprobs(rows);
  Gpu<float> z(static_cast<size_t>(block * ld));
  Gpu<uint8_t> scratch(cuda::sampler_scratch_bytes(block, vocab));
  const cuda::SampleOutput out{tokens.get(),      logprobs.get(),    top_ids.get(),       top_logprobs.get(),
                               id_logprobs.get(), kept_counts.get(), kept_logprobs.get(), kept_ids.get()};
  for (int first = 0; first < rows; first += block) {
    const int count = std::min(block, rows - first);
    for (int i = 0; i < count; ++i)
      check(cudaMemcpy(z.get() + i * ld, logits[first + i].data(), vocab * 4, cudaMemcpyHostToDevice), "logits");
    cuda::sample(z.get(), ld, vocab, on.rows(), first, count, cuda::sample_traits(batch, vocab), out, scratch.get(),
                 nullptr);
    check(cudaDeviceSynchronize(), "sample");
  }
  scratch.read("scratch"), z.read("logits"), on.saved_history.read("saved history"), on.saved_bias.read("saved bias");
  return {tokens.read("tokens"),           logprobs.read("logprobs"),
          top_ids.read("top ids"),         top_logprobs.read("top logprobs"),
          id_logprobs.read("id logprobs"), {},
          kept_counts.read("kept counts"), kept_logprobs.read("kept logprobs"),
          kept_ids.read("kept ids")};
}

StepResult on_host(const StepBatch& batch, const std::vector<int32_t>& positions,
                   const std::vector<std::vector<float>>& logits) {
  static const cpu::Kernels& kernels = cpu::kernels("");
  cpu::Sampler sampler(kernels, static_cast<int>(logits[0].size()), 1);
  StepResult result;
  sampler.begin(batch, result);
  for (int r = 0; r < batch.rows(); ++r) {
    std::vector<float> z = logits[r];
    sampler.row(r, positions[r], z.data(), 0);
  }
  sampler.end();
  return result;
}

std::vector<float> processed(const Row& row, std::vector<float> z) {
  std::vector<int32_t> counts(z.size(), 0);
  cpu::apply_penalties(z.data(), row.history, row.history_prompt, {row.frequency, row.presence, row.repetition},
                       counts);
  for (auto [token, value] : row.bias) z[token] += value;
  if (!row.mask.empty()) cpu::apply_mask(z.data(), static_cast<int>(z.size()), row.mask);
  for (float& x : z) x /= row.temperature;
  return z;
}

// The token and the limit of top-p or min-p, or 0, are equal within rounding.
bool at_limit(const Row& row, const std::vector<float>& z, int token) {
  const int n = static_cast<int>(z.size());
  const float max = *std::max_element(z.begin(), z.end());
  const double p = std::exp(static_cast<double>(z[token]) - max);
  if (p < 1e-36 || std::abs(p - row.min_p) <= 1e-6 * p) return true;
  double before = 0, total = 0;
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return z[i] > z[j]; });
  if (row.top_k > 0 && row.top_k < n) order.resize(row.top_k);
  bool passed = false;
  for (const int i : order) {
    const double q = std::exp(static_cast<double>(z[i]) - max);
    passed |= i == token;
    if (!passed) before += q;
    total += q;
  }
  return passed && std::abs(before - row.top_p * total) <= 1e-6 * total;
}

// Two samplers may draw different tokens if scores, or a token and a limit, are equal within rounding.
bool may_differ(const Row& row, int32_t position, const std::vector<float>& logits, int a, int b) {
  const std::vector<float> z = processed(row, logits);
  const float max = *std::max_element(z.begin(), z.end());
  const auto score = [&](int token) {
    const float u = noise_uniform(sample_noise(row.seed, position, token / 4).x[token % 4]);
    return (static_cast<double>(z[token]) - max) - std::log(-std::log1p(-static_cast<double>(u)));
  };
  if (std::abs(score(a) - score(b)) < 1e-5) return true;
  return at_limit(row, z, score(a) > score(b) ? a : b);
}

bool near(float got, float expected) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= 2e-6f + 5e-7f * std::abs(expected);
}

struct Case {
  std::string name;
  BatchBuilder batch;
  std::vector<Row> rows;
  std::vector<int32_t> positions;
  std::vector<std::vector<float>> logits;
  void add(const Row& row, int32_t position, std::vector<float> z) {
    batch.row(row);
    rows.push_back(row), positions.push_back(position), logits.push_back(std::move(z));
  }
};

long drawn = 0, differing = 0;

// A row's kept set; empty for rows that want none, and for sets that are only counted.
std::vector<int32_t> kept_set(const StepResult& result, int begin, int count, int room) {
  const auto at = result.kept_ids.begin() + begin;
  return count > room ? std::vector<int32_t>{} : std::vector<int32_t>(at, at + count);
}

// `at`: where the set of the GPU begins, `from`: that of the CPU.
void compare_kept(const char* where, const Row& row, const std::vector<float>& logits, const StepResult& got, int at,
                  const StepResult& expected, int from, int r) {
  const int count = got.kept_counts[r], wanted = expected.kept_counts[r];
  const auto a = kept_set(got, at, count, kMostKept), b = kept_set(expected, from, wanted, kMostKept);
  if (a == b && count == wanted) {
    if (got.tokens[r] != expected.tokens[r]) return;
    CHECKF(near(got.kept_logprobs[r], expected.kept_logprobs[r]), "%s: kept logprob %.9g, expected %.9g", where,
           got.kept_logprobs[r], expected.kept_logprobs[r]);
    return;
  }
  ++differing;
  if (a.empty() || b.empty()) {
    CHECKF(count > 0 && std::abs(count - wanted) <= 1 + wanted / 1000, "%s: %d kept, expected %d", where, count,
           wanted);
    return;
  }
  const std::vector<float> z = processed(row, logits);
  const std::set<int32_t> left(a.begin(), a.end()), right(b.begin(), b.end());
  for (const auto& [one, other] : {std::pair{&left, &right}, {&right, &left}}) {
    for (const int32_t id : *one) {
      if (other->count(id) != 0) continue;
      if (!CHECKF(at_limit(row, z, id), "%s: kept %d of %d and %d", where, id, count, wanted)) return;
    }
  }
}

void compare(const Case& c, int block) {
  const StepBatch batch = c.batch.view();
  const StepResult got = on_gpu(batch, c.positions, c.logits, block), expected = on_host(batch, c.positions, c.logits);
  const int vocab = static_cast<int>(c.logits[0].size());
  const auto offsets = GpuBatch::tops(batch), kept_offsets = GpuBatch::kept(batch, vocab);
  int from = 0;
  for (int r = 0; r < batch.rows(); ++r) {
    const Row& row = c.rows[r];
    char where[256];
    std::snprintf(where, sizeof where,
                  "%s, vocab %d, row %d (target %d, k %d, p %g, min_p %g, t %g, top %d, flags %d, history %zu, bias "
                  "%zu, mask %zu)",
                  c.name.c_str(), vocab, r, row.target, row.top_k, row.top_p, row.min_p, row.temperature, row.top,
                  row.flags, row.history.size(), row.bias.size(), row.mask.size());
    ++drawn;
    const int token = got.tokens[r];
    if (!CHECKF(token >= 0 && token < vocab, "%s: token %d", where, token)) continue;
    if (token != expected.tokens[r]) {
      ++differing;
      const bool excused = row.target < 0 && row.temperature > 0 && row.top_k != 1 &&
                           may_differ(row, c.positions[r], c.logits[r], token, expected.tokens[r]);
      CHECKF(excused, "%s: token %d, expected %d", where, token, expected.tokens[r]);
    } else {
      CHECKF(near(got.logprobs[r], expected.logprobs[r]), "%s: logprob %.9g, expected %.9g", where, got.logprobs[r],
             expected.logprobs[r]);
    }
    if (wants_kept(batch, r)) {
      compare_kept(where, row, c.logits[r], got, kept_offsets[r], expected, from, r);
      if (expected.kept_counts[r] <= kMostKept) from += expected.kept_counts[r];
    }
    for (int i = offsets[r]; i < offsets[r + 1]; ++i) {
      if (!CHECKF(got.top_ids[i] == expected.top_ids[i] && near(got.top_logprobs[i], expected.top_logprobs[i]),
                  "%s: top %d is %d (%.9g), expected %d (%.9g)", where, i - offsets[r], got.top_ids[i],
                  got.top_logprobs[i], expected.top_ids[i], expected.top_logprobs[i]))
        break;
    }
    for (int i = batch.id_offsets[r]; i < batch.id_offsets[r + 1]; ++i) {
      if (!CHECKF(near(got.id_logprobs[i], expected.id_logprobs[i]), "%s: logprob of id %d is %.9g, expected %.9g",
                  where, batch.ids[i], got.id_logprobs[i], expected.id_logprobs[i]))
        break;
    }
  }
  // A row's result depends neither on other rows nor on the block that computes it.
  const auto same = [](float a, float b) { return std::memcmp(&a, &b, 4) == 0; };
  for (int r = 0; r < batch.rows(); r += 5) {
    BatchBuilder alone;
    alone.row(c.rows[r]);
    const StepResult one = on_gpu(alone.view(), {c.positions[r]}, {c.logits[r]}, 1);
    bool equal = one.tokens[0] == got.tokens[r] && same(one.logprobs[0], got.logprobs[r]);
    for (size_t i = 0; i < one.top_ids.size(); ++i)
      equal &=
          one.top_ids[i] == got.top_ids[offsets[r] + i] && same(one.top_logprobs[i], got.top_logprobs[offsets[r] + i]);
    for (size_t i = 0; i < one.id_logprobs.size(); ++i)
      equal &= same(one.id_logprobs[i], got.id_logprobs[batch.id_offsets[r] + i]);
    if (wants_kept(batch, r)) {
      equal &= one.kept_counts[0] == got.kept_counts[r] && same(one.kept_logprobs[0], got.kept_logprobs[r]) &&
               kept_set(one, 0, one.kept_counts[0], kMostKept) ==
                   kept_set(got, kept_offsets[r], got.kept_counts[r], kMostKept);
    }
    CHECKF(equal, "%s: row %d alone differs from row %d of %d", c.name.c_str(), r, r, batch.rows());
  }
}

}  // namespace
