#include "cpu/sampler/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/sampler/sampler_gumbel.h"
#include "cpu/sampler/sampler_mask.h"
#include "cpu/sampler/sampler_order.h"
#include "cpu/sampler/sampler_penalty.h"

namespace refit::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool has_nan(const float* z, int n) {
  bool found = false;
  for (int i = 0; i < n; ++i) found |= z[i] != z[i];
  return found;
}

// prob = exp(z - max); returns the sum. Partial sums are added in double: a vocabulary is long.
double exponentials(const Kernels& k, const float* z, int n, float max, float* prob) {
  constexpr int kChunk = 2048;
  double sum = 0.0;
  for (int i = 0; i < n; i += kChunk) {
    const int count = std::min(kChunk, n - i);
    std::copy_n(z + i, count, prob + i);
    sum += k.exp_sum(prob + i, max, count);
  }
  return sum;
}

template <class T>
std::span<const T> slice(std::span<const T> all, std::span<const int32_t> offsets, int r) {
  return all.subspan(offsets[r], offsets[r + 1] - offsets[r]);
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocab, int threads) : k_(kernels), vocab_(vocab), scratch_(threads) {}

void Sampler::begin(const StepBatch& batch, StepResult& result) {
  batch_ = &batch;
  result_ = &result;
  const int rows = batch.rows();
  top_offsets_.assign(rows + 1, 0);
  for (int r = 0; r < rows; ++r)
    top_offsets_[r + 1] = top_offsets_[r] + batch.row_ints[static_cast<size_t>(r) * kRowInts + 3];
  result.tokens.assign(rows, 0);
  result.logprobs.assign(rows, kNaN);
  result.top_ids.assign(top_offsets_[rows], 0);
  result.top_logprobs.assign(top_offsets_[rows], kNaN);
  result.id_logprobs.assign(batch.ids.size(), kNaN);
  bool kept = false;
  for (int r = 0; r < rows; ++r) kept |= wants_kept(batch, r);
  kept_.assign(kept ? rows : 0, {});
  result.kept_counts.assign(kept_.size(), 0);
  result.kept_logprobs.assign(kept_.size(), kNaN);
  result.kept_ids.clear();
}

void Sampler::end() {
  for (const auto& ids : kept_) result_->kept_ids.insert(result_->kept_ids.end(), ids.begin(), ids.end());
}

void Sampler::row(int r, int32_t position, float* logits, int thread) {
  const StepBatch& b = *batch_;
  SamplerScratch& scratch = scratch_[thread];
  const int32_t* ints = b.row_ints.data() + static_cast<size_t>(r) * kRowInts;
  const float* floats = b.row_floats.data() + static_cast<size_t>(r) * kRowFloats;
  const float temperature = floats[0];
  const int target = ints[1];
  const bool greedy = temperature == 0.0f || ints[2] == 1;
  const bool wants = (ints[4] & kRowWantLogprob) != 0 || ints[3] > 0 || b.id_offsets[r + 1] > b.id_offsets[r];
  const bool raw = wants && (ints[4] & kRowRawLogprob) != 0;
  scratch.prob.resize(vocab_);
  scratch.counts.resize(vocab_);
  if (raw) scratch.raw.assign(logits, logits + vocab_);

  apply_penalties(logits, slice(b.history, b.history_offsets, r), ints[5], {floats[3], floats[4], floats[5]},
                  scratch.counts);
  apply_bias(logits, slice(b.bias_tokens, b.bias_offsets, r), slice(b.bias_values, b.bias_offsets, r));
  if (ints[6] >= 0) apply_mask(logits, vocab_, b.masks.subspan(ints[6] * mask_words(vocab_), mask_words(vocab_)));
  if (temperature != 0.0f && temperature != 1.0f) {
    for (int i = 0; i < vocab_; ++i) logits[i] /= temperature;
  }

  float max = has_nan(logits, vocab_) ? kNaN : k_.max(logits, vocab_);
  const bool sound = std::isfinite(max);
  double sum = kNaN;
  float* prob = scratch.prob.data();
  if (sound && (wants || (target < 0 && !greedy))) sum = exponentials(k_, logits, vocab_, max, prob);

  int token = target;
  if (token < 0) token = greedy || !sound ? argmax(logits, vocab_) : pick(r, position, logits, max, prob, scratch);
  result_->tokens[r] = token;
  if (wants_kept(b, r)) report_kept(r, token, logits, max, greedy || !sound ? nullptr : prob, scratch);
  if (!wants) return;
  if (!raw) return report(r, token, logits, max, std::log(sum), scratch);
  const float* z = scratch.raw.data();
  max = has_nan(z, vocab_) ? kNaN : k_.max(z, vocab_);
  report(r, token, z, max, std::isfinite(max) ? std::log(exponentials(k_, z, vocab_, max, prob)) : kNaN, scratch);
}

int Sampler::pick(int r, int32_t position, const float* z, float max, float* prob, SamplerScratch& scratch) const {
  const int top_k = batch_->row_ints[static_cast<size_t>(r) * kRowInts + 2];
  const float* floats = batch_->row_floats.data() + static_cast<size_t>(r) * kRowFloats;
  keep_top_k(z, prob, vocab_, top_k, scratch.order);
  keep_top_p(z, prob, vocab_, floats[1], scratch.order);
  keep_min_p(prob, vocab_, floats[2]);
  return sample_gumbel(z, max, prob, vocab_, argmax(z, vocab_), batch_->row_seeds[r], position);
}

void Sampler::report_kept(int r, int token, const float* z, float max, const float* prob, SamplerScratch& scratch) {
  if (prob == nullptr) {
    kept_[r] = {token};
    result_->kept_counts[r] = 1;
    result_->kept_logprobs[r] = std::isfinite(max) ? 0.0f : kNaN;
    return;
  }
  std::vector<int32_t>& order = scratch.order;
  order.clear();
  double mass = 0.0;
  for (int i = 0; i < vocab_; ++i) {
    if (prob[i] == 0.0f) continue;
    order.push_back(i);
    mass += prob[i];
  }
  result_->kept_counts[r] = static_cast<int32_t>(order.size());
  result_->kept_logprobs[r] = static_cast<float>((static_cast<double>(z[token]) - max) - std::log(mass));
  if (order.size() > static_cast<size_t>(kMostKept)) return;
  std::sort(order.begin(), order.end(), TokenOrder{z});
  kept_[r] = order;
}

void Sampler::report(int r, int token, const float* z, float max, double log_sum, SamplerScratch& scratch) const {
  const int32_t* ints = batch_->row_ints.data() + static_cast<size_t>(r) * kRowInts;
  const auto logprob = [&](int id) { return static_cast<float>((static_cast<double>(z[id]) - max) - log_sum); };
  if ((ints[4] & kRowWantLogprob) != 0) result_->logprobs[r] = logprob(token);
  if (ints[3] > 0) {
    best_tokens(z, vocab_, ints[3], scratch.order);
    for (int i = 0; i < ints[3]; ++i) {
      result_->top_ids[top_offsets_[r] + i] = scratch.order[i];
      result_->top_logprobs[top_offsets_[r] + i] = logprob(scratch.order[i]);
    }
  }
  for (int32_t i = batch_->id_offsets[r]; i < batch_->id_offsets[r + 1]; ++i)
    result_->id_logprobs[i] = logprob(batch_->ids[i]);
}

}  // namespace refit::cpu
