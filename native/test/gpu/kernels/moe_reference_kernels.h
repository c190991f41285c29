// The kernels of moe_reference.cuh: a mixture of experts in double, for pairs of a token and an expert.
#pragma once
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::test {

// act[p, i] = round(round(activation(g)) * u) with g, u rounded sums of pair p's expert in double.
void launch_gate_up(unsigned pairs, const cuda::Element* x, const cuda::Element* w13, const int32_t* ids, int k,
                    int64_t hidden, int64_t inter, bool gelu, cuda::Element* act);

// out[p, h]: the product of pair p's activation and its expert's w2, in double.
void launch_down(unsigned pairs, const cuda::Element* act, const cuda::Element* w2, const int32_t* ids, int64_t hidden,
                 int64_t inter, double* out);

// The part of one of two ranks: columns [rank * inter / 2, ...) of gate and up, the same of w2's rows.
void launch_half(const cuda::Element* w13, const cuda::Element* w2, int rank, int64_t experts, int64_t hidden,
                 int64_t inter, cuda::Element* half13, cuda::Element* half2);

}  // namespace refit::test
