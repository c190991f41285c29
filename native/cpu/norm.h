// RMSNorm in Hugging Face's order: x * rstd is rounded to the dtype first (unless the recipe rounds once), then
// multiplied by the weight and rounded.
#pragma once
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

// out may be x. weight: floats.
void rms_norm(const Context& ctx, const float* x, const float* weight, float* out, int64_t n, float eps);

// The parts of a norm after its sum of squares: rstd of n elements, and out = x * rstd * weight. out may be x.
float rstd_of(float sum_squares, int64_t n, float eps);
void scale(const Context& ctx, const float* x, float rstd, const float* weight, float* out, int64_t n);

// For each row: h += sum over ranks of parts[rank] (+ bias, once), then out = rms_norm(h). The sum is taken in rank
// order in fp32 and rounded once; the residual is rounded before the norm reads it. parts: `ranks` pointers to [rows,
// n]; 0 ranks: only the norm. weight null: no norm (out unused). bias may be null. Weights and bias are floats.
void add_and_norm(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  float* out, int64_t rows, int64_t n, float eps);

// The same with the norm on the sum (NormPlacement::kPost): h += rms_norm(sum over ranks of parts[rank] (+ bias)).
// parts[0] is overwritten.
void norm_and_add(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  int64_t rows, int64_t n, float eps);

}  // namespace refit::cpu
