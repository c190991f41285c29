// From logits to tokens and logprobs on the GPU, in fp32. The rules, their order and the noise equal those of
// native/cpu/sampler/sampler.h. A row's result depends on its logits and its own fields only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/step.h"

namespace refit::cuda {

// The sampling fields of a step's rows, on the GPU (meaning and shapes as in core/step.h and src/native/step.ts).
struct SampleRows {
  const int32_t* row_ints;
  const float* row_floats;
  const uint64_t* row_seeds;
  const int32_t* positions;  // [R] absolute, of the token to sample
  const int32_t* history_offsets;
  const int32_t* history;
  const int32_t* bias_offsets;
  const int32_t* bias_tokens;
  const float* bias_values;
  const int32_t* id_offsets;
  const int32_t* ids;
  const uint32_t* masks;
  const int32_t* top_offsets;  // [R + 1] prefix sums of rowInts[3]
  // [R + 1] prefix sums of kept_room; read only with SampleTraits::kept.
  const int32_t* kept_offsets;
  // Scratch as long as history and bias_tokens: the original logits of rows that request raw logprobs. Used only with
  // SampleTraits::raw.
  float* saved_history;
  float* saved_bias;
};

// Memory for the results, on the GPU; flat like StepResult. Every entry of the rows is written.
struct SampleOutput {
  int32_t* tokens;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
  float* id_logprobs;
  // Only with SampleTraits::kept, only for rows that want them. Each set begins at its kept_offsets; a larger set than
  // there is room for is only counted.
  int32_t* kept_counts;
  float* kept_logprobs;
  int32_t* kept_ids;
};

// Facts of the batch that choose kernels; the host finds them. Each may be true for rows that do not need it.
struct SampleTraits {
  bool filters = false;    // any row that samples with top_k, top_p or min_p
  bool penalties = false;  // any row with history and a penalty
  bool bias = false;
  bool raw = false;   // any row that requests raw logprobs
  bool tops = false;  // any row that requests top logprobs
  bool ids = false;   // any row that requests logprobs of given tokens
  bool kept = false;  // any row that wants its kept set
};
SampleTraits sample_traits(const StepBatch& batch, int vocab);

// Bytes of scratch for at most `rows` rows at a time.
size_t sampler_scratch_bytes(int64_t rows, int vocab);

// Rows [first_row, first_row + count) of the step. logits: [count, ld] floats; the first `vocab` of each row are used
// and overwritten; aligned to 16, ld a multiple of 4. scratch: aligned to 16.
void sample(float* logits, int64_t ld, int vocab, const SampleRows& rows, int first_row, int count,
            const SampleTraits& traits, const SampleOutput& output, void* scratch, cudaStream_t stream);

}  // namespace refit::cuda
