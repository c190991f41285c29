// y = x w^T + bias by the panels and tiles of one instruction set: divides the work and hands it to the pool.
#pragma once
#include <cstdint>

#include "core/pool.h"
#include "cpu/isa/isa.h"

namespace refit::cpu {

// As Kernels::gemm; w has ops.weight_bytes per element, bias likewise.
void gemm(const GemmOps& ops, Pool& pool, const float* x, int64_t ldx, const void* w, const void* bias, float* y,
          int64_t ldy, int64_t M, int64_t N, int64_t K);

}  // namespace refit::cpu
