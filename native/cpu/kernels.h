// The CPU's kernels: one table of functions per instruction set, chosen at run time. Every kernel computes each output
// in an order that depends only on the output's own coordinates, so results have the same bits for any batch, chunking
// and thread count.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/pool.h"

namespace refit::cpu {

struct Kernels {
  const char* name;

  // y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) in fp32, for rows [0, M) and columns [0, N).
  // x: float [M, ldx]; with bf16 weights its values are already rounded to bf16 by the caller. w: row-major [N, K] of
  // `dtype`. y: float [M, ldy]. bias: null, or [N] of `dtype`. Work is split over N (and M), never over K.
  void (*gemm)(Pool& pool, const float* x, int64_t ldx, const void* w, DType dtype, const void* bias, float* y,
               int64_t ldy, int64_t M, int64_t N, int64_t K);

  // Fixed-order reductions and maps over contiguous floats.
  float (*dot)(const float* a, const float* b, int64_t n);
  float (*dot_bf16)(const float* a, const uint16_t* b, int64_t n);
  void (*axpy)(float s, const float* x, float* y, int64_t n);  // y += s * x
  void (*axpy_bf16)(float s, const uint16_t* x, float* y, int64_t n);
  float (*sum_squares)(const float* x, int64_t n);
  // In place, round to bf16 and back.
  void (*round_bf16)(float* x, int64_t n);
  void (*to_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*from_bf16)(const uint16_t* x, float* y, int64_t n);
  // out = silu(gate) * up, element-wise; the same with GELU's approximation by tanh.
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);
  void (*gelu_tanh_mul)(const float* gate, const float* up, float* out, int64_t n);
  // x[i] = exp(x[i] - max); returns the sum, in fixed order.
  float (*exp_sum)(float* x, float max, int64_t n);
  float (*max)(const float* x, int64_t n);
};

// The kernel sets that this machine can run, best first: avx512bf16, avx512, avx2, scalar.
std::vector<std::string> isas();
// Throws std::invalid_argument for an unknown or unavailable name; empty picks the best.
const Kernels& kernels(const std::string& isa);

}  // namespace refit::cpu
