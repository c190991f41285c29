#include "cpu/norm.h"

#include <cmath>

namespace refit::cpu {
namespace {

void multiply(float* x, const float* w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= w[i];
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// Row `row` of parts[0] becomes the rounded sum of all ranks' rows and the bias.
float* sum_parts(const Context& ctx, float* const* parts, int ranks, const float* bias, int64_t row, int64_t n) {
  float* sum = parts[0] + row * n;
  for (int rank = 1; rank < ranks; ++rank) add(sum, parts[rank] + row * n, n);
  if (bias != nullptr) add(sum, bias, n);
  ctx.round(sum, n);
  return sum;
}

}  // namespace

float rstd_of(float sum_squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_squares / static_cast<float>(n) + eps);
}

void scale(const Context& ctx, const float* x, float rstd, const float* weight, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd;
  ctx.round_between(out, n);
  multiply(out, weight, n);
  ctx.round(out, n);
}

void rms_norm(const Context& ctx, const float* x, const float* weight, float* out, int64_t n, float eps) {
  scale(ctx, x, rstd_of(ctx.k.sum_squares(x, n), n, eps), weight, out, n);
}

void add_and_norm(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  float* out, int64_t rows, int64_t n, float eps) {
  for_blocks(ctx.pool, rows, n, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* hr = h + row * n;
      if (ranks > 0) {
        add(hr, sum_parts(ctx, parts, ranks, bias, row, n), n);
        ctx.round(hr, n);
      }
      if (weight != nullptr) rms_norm(ctx, hr, weight, out + row * n, n, eps);
    }
  });
}

void norm_and_add(const Context& ctx, float* h, float* const* parts, int ranks, const float* bias, const float* weight,
                  int64_t rows, int64_t n, float eps) {
  for_blocks(ctx.pool, rows, n, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* sum = sum_parts(ctx, parts, ranks, bias, row, n);
      rms_norm(ctx, sum, weight, sum, n, eps);
      add(h + row * n, sum, n);
      ctx.round(h + row * n, n);
    }
  });
}

}  // namespace refit::cpu
