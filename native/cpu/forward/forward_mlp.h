// The gated MLP of all ranks: down(act(gate(x)) * up(x)).
#pragma once
#include <vector>

#include "core/layout.h"
#include "cpu/adapters.h"
#include "cpu/forward/forward_common.h"

namespace refit::cpu {

// One rank's weights of an MLP or of an expert. gate_up: [2 * inter, hidden], down: [outputs, input_cols(inter)].
struct MlpWeights {
  const void *gate_up, *down;
};

// One rank's product of o, down or w2: y [rows, outputs] += the product of x [rows, depth]. Rows of x have the columns
// of all ranks, rows of y the hidden state's.
struct OutputProduct {
  const float* x;
  int64_t depth;
  float* y;
};

// inputs: [rows, ranks * own]. parts: as `y` of gated_mlp.
inline OutputProduct output_product(const Layout& layout, int rank, const float* inputs, int64_t own,
                                    const std::vector<float*>& parts) {
  if (layout.gathers) return {inputs, layout.ranks * own, parts[0] + rank * layout.outputs};
  return {inputs + rank * own, own, parts[rank]};
}

// Scratch that the dense MLP and the experts share.
struct MlpScratch {
  Buffer gate_up, act, ones;
};

// The adapters of the rows of one MLP or one expert.
struct MlpAdapters {
  Adapters& adapters;
  int layer, expert;
  const int32_t* slots;  // [rows]
};

// x: [rows, hidden], rounded. weights: of each rank, of ctx.dtype. y: each rank's part of the sum, [rows, hidden] in
// fp32, not rounded; the first one alone, with the whole sum, if ranks gather. adapters: null if no row has one.
void gated_mlp(const Context& ctx, const Layout& layout, int64_t inter, const float* x,
               const std::vector<MlpWeights>& weights, const std::vector<float*>& y, int64_t rows, MlpScratch& scratch,
               const MlpAdapters* adapters = nullptr);

}  // namespace refit::cpu
