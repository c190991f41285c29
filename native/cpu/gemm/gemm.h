// Computes y = x w^T + bias with the panels and tiles of one instruction set. Divides the work and gives it to the
// pool.
#pragma once
#include <cstdint>

#include "core/pool.h"
#include "cpu/isa/isa.h"

namespace refit::cpu {

// The same as Kernels::gemm. The elements of w and of bias have ops.weight_bytes each.
void gemm(const GemmOps& ops, Pool& pool, const float* x, int64_t ldx, const void* w, const void* bias, float* y,
          int64_t ldy, int64_t M, int64_t N, int64_t K);

}  // namespace refit::cpu
