// Internal to the sampler: types that its kernels share, and their launchers.
#pragma once
#include "cuda/sampler/sampler.h"

namespace refit::cuda {

// A row is reduced in chunks at fixed places, so its sums do not depend on the batch.
constexpr int kSampleChunk = 8192;

// Tokens are compared by one number: the order of their logit (native/cpu/sampler/sampler_order.h) above the complement
// of their id. Larger is better; no two are equal, none is 0.
using Composite = uint64_t;

struct ChunkBest {
  Composite best;
  int32_t nan;  // the chunk contains a NaN
};
struct ChunkDraw {
  double sum;     // of exp(z - max)
  uint64_t pick;  // best score and its token, ordered as Composite; 0 if no token can win
};
// The terms of a row's logprobs.
struct RowScale {
  double log_sum;  // NaN: the row's logprobs are NaN
  float max;
};

struct SampleScratch {
  ChunkBest* best;   // [rows, chunks]
  ChunkDraw* draws;  // [rows, chunks]
  Composite* least;  // [rows] limit of top-k and top-p; written only for rows that use one
  RowScale* scales;  // [rows]
  int32_t* counts;   // [kCountArrays, vocab]
};
constexpr int kCountArrays = 32;

struct SampleJob {
  float* logits;
  int64_t ld;
  int vocab, chunks;
  SampleRows rows;
  int first_row, count;
  SampleOutput output;
  SampleScratch scratch;
};

// Applies penalties and bias in place; with `save`, first saves the logits of rows that request raw logprobs.
void adjust_logits(const SampleJob& job, bool save, cudaStream_t stream);
// Restores the original logits of rows that request raw logprobs.
void restore_logits(const SampleJob& job, cudaStream_t stream);
// The best token of each chunk; `raw`: of the current logits, and only for rows that request raw logprobs.
void find_best(const SampleJob& job, bool raw, cudaStream_t stream);
// After find_best: the limits of top-k and top-p.
void find_limits(const SampleJob& job, cudaStream_t stream);
// After find_best (and find_limits): sums and draws of each chunk, then tokens and logprobs.
void draw_tokens(const SampleJob& job, bool raw, cudaStream_t stream);
// After draw_tokens of the processed logits.
void report_kept(const SampleJob& job, cudaStream_t stream);
// After draw_tokens.
void report_tops(const SampleJob& job, cudaStream_t stream);
void report_ids(const SampleJob& job, cudaStream_t stream);

}  // namespace refit::cuda
