// The gated MLP of one rank: down(act(gate(x)) * up(x)).
#pragma once
#include "cpu/adapters.h"
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

// Scratch that the dense MLP and the experts share.
struct MlpScratch {
  Buffer gate_up, act, ones;
};

// The adapters of the rows of one MLP or one expert.
struct MlpAdapters {
  Adapters& adapters;
  int rank, layer, expert;
  const int32_t* slots;  // [rows]
};

// x: [rows, hidden], rounded. gate_up: [2 * inter, hidden] and down: [hidden, inter], of ctx.dtype. y: [rows, hidden],
// this rank's part of the sum, in fp32, not rounded. adapters: null if no row has one.
void gated_mlp(const Context& ctx, const float* x, const void* gate_up, const void* down, float* y, int64_t rows,
               int64_t hidden, int64_t inter, MlpScratch& scratch, const MlpAdapters* adapters = nullptr);

}  // namespace refit::cpu
