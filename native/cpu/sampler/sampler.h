// From logits to tokens and logprobs, in fp32, one row at a time:
//
// penalties -> bias -> mask of allowed tokens -> temperature -> top-k -> top-p -> min-p -> Gumbel-max with
// counter-based noise (core/philox.h).
//
// A row's result depends only on its logits and its own fields.
//
// Logprobs are log-softmax over the whole vocabulary after penalties, bias, mask and temperature (or of the raw logits,
// on request). They are never renormalised over the tokens that top-k, top-p and min-p keep. Temperature 0 means
// greedy: logprobs are then those of temperature 1.
//
// A row's kept set (kRowWantKept) is the tokens that top-k, top-p and min-p keep and that can be drawn, best first; its
// logprob is the token's within that set. A greedy row keeps its token alone.
//
// A row with a NaN or without any finite maximum does not fail: it takes the largest logit that is not NaN, and its
// logprobs are NaN.
#pragma once
#include <cstdint>
#include <vector>

#include "core/step.h"
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

// Buffers of one thread.
struct SamplerScratch {
  std::vector<float> raw, prob;
  std::vector<int32_t> order, counts;
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab, int threads);

  // Sizes the result. Batch and result must live until the last row() of the step.
  void begin(const StepBatch& batch, StepResult& result);
  // Fills row r of the result. `position` is the absolute position of the token to sample. `logits` [vocab] are
  // overwritten. Any thread of the pool may call it.
  void row(int r, int32_t position, float* logits, int thread);
  // After the last row: completes the result.
  void end();

 private:
  int pick(int r, int32_t position, const float* z, float max, float* prob, SamplerScratch& scratch) const;
  void report(int r, int token, const float* z, float max, double log_sum, SamplerScratch& scratch) const;
  // prob is 0 for tokens that were dropped.
  void report_kept(int r, int token, const float* z, float max, const float* prob, SamplerScratch& scratch);

  const Kernels& k_;
  const int vocab_;
  std::vector<SamplerScratch> scratch_;
  const StepBatch* batch_ = nullptr;
  StepResult* result_ = nullptr;
  std::vector<int64_t> top_offsets_;
  std::vector<std::vector<int32_t>> kept_;  // by row; empty if no row wants its kept set
};

}  // namespace refit::cpu
