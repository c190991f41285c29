// RMSNorm in Hugging Face's order: x * rstd is rounded to the dtype first, then multiplied by the weight and rounded
// again.
#pragma once
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

// out may be x. weight: floats.
void rms_norm(const Context& ctx, const float* x, const float* weight, float* out, int64_t n, float eps);

// For each row: h += sum over ranks of parts[rank] (+ bias, once), then out = rms_norm(h). The sum is taken in rank
// order in fp32 and rounded once; the residual is rounded before the norm sees it. parts: `ranks` pointers to [rows,
// n]; 0 ranks: the norm alone. weight null: no norm (out unused). bias may be null. Weights and bias are floats.
void add_and_norm(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  float* out, int64_t rows, int64_t n, float eps);

}  // namespace refit::cpu
