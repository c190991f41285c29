// From logits to tokens and logprobs on the GPU, in fp32; the rules, their order and the noise are those of
// native/cpu/sampler/sampler.h. A row's result depends on its logits and its own fields alone.
#pragma once
#include <cstddef>

#include "core/step.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// The sampling fields of a step's rows, on the GPU (meaning and shapes as in core/step.h and src/native/addon.ts).
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
  const int32_t* top_offsets;  // [R + 1] prefix sums of rowInts[3]
  // Scratch, as long as history and bias_tokens: logits as they came, for rows that want raw logprobs. Used only with
  // SampleTraits::raw.
  float* saved_history;
  float* saved_bias;
};

// Where results go, on the GPU; flat as StepResult. Every entry of the rows is written.
struct SampleOutput {
  int32_t* tokens;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
  float* id_logprobs;
};

// Facts of the batch that choose kernels, found on the host. Each may be true for rows that turn out not to need it.
struct SampleTraits {
  bool filters = false;    // any row that draws with top_k, top_p or min_p in force
  bool penalties = false;  // any row with history and a penalty in force
  bool bias = false;
  bool raw = false;   // any row that wants raw logprobs
  bool tops = false;  // any row that wants top logprobs
  bool ids = false;   // any row that wants logprobs of given tokens
};
SampleTraits sample_traits(const StepBatch& batch, int vocab);

// Bytes of scratch for at most `rows` rows at a time.
size_t sampler_scratch_bytes(int64_t rows, int vocab);

// Rows [first_row, first_row + count) of the step. logits: [count, ld] floats of which the first `vocab` of each row
// count, overwritten; aligned to 16, ld a multiple of 4. scratch: aligned to 16.
void sample(float* logits, int64_t ld, int vocab, const SampleRows& rows, int first_row, int count,
            const SampleTraits& traits, const SampleOutput& output, void* scratch, cudaStream_t stream);

}  // namespace refit::cuda
