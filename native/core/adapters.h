// Slots of LoRA adapters: parameters like all others, at fixed addresses, which a write fills as it fills weights. An
// adapter adds scale * B (A x) to a linear; a step names the slot of each sequence (StepBatch::adapters).
//
// S slots of rank R (a multiple of 16), per rank; other letters as in core/model.h. A linear without these parameters
// takes no adapters.
//   adapters.table             [S * (7 L + 2), 2] float32: scale, and rank (0: the adapter leaves this linear alone);
//                              rows of a slot: q, k, v, o, gate, up, down of each layer, then embed and lm_head
//   adapters.layers.L.qkv_a    [S * 3 R, H]        rows of q, then k, then v
//   adapters.layers.L.qkv_b    [S * (nq + 2 nkv) * hd, R]
//   adapters.layers.L.o_a      [S * R, nq * hd]    a rank's columns
//   adapters.layers.L.o_b      [S * H, R]          whole on every rank: each adds its part before ranks are summed
//   adapters.layers.L.gate_up_a [S * 2 R, H], gate_up_b [S * 2 I, R]; down_a [S * R, I], down_b [S * H, R]
//   adapters.layers.L.w13_a    [S * E * 2 R, H], w13_b [S * E * 2 I_e, R]; w2_a [S * E * R, I_e], w2_b [S * E * H, R]
//   adapters.embed_a           [S * V, R]          transposed, so that a token's row is contiguous
//   adapters.embed_b           [S * H, R]
//   adapters.lm_head_a         [S * R, H], lm_head_b [S * V, R]
// Rows of A and columns of B from an adapter's rank on are zero up to the next multiple of 16; beyond that they are
// finite. With Layout::gathers, A of o, down and w2 has the columns of all ranks, and B H / ranks rows.
#pragma once
#include <cstdint>

namespace refit {

constexpr int kAdapterRankMultiple = 16;

// The linears of a layer that have a row in the table, in its order; embed and lm_head come after all layers.
enum AdaptedLinear : int { kAdaptQ, kAdaptK, kAdaptV, kAdaptO, kAdaptGate, kAdaptUp, kAdaptDown, kAdaptedLinears };

// The parameter ids of one linear's A and B; -1: it takes no adapters.
struct AdapterPair {
  int a = -1, b = -1;
  bool exists() const { return a >= 0; }
};

struct AdapterLayout {
  int slots = 0, rank = 0;
  int table = -1;
  AdapterPair embed, lm_head;
  int layers = 0;

  int rows_of_slot() const { return kAdaptedLinears * layers + 2; }
  // The table's row of a linear of a layer, from the slot's first row.
  int row(int layer, AdaptedLinear linear) const { return layer * kAdaptedLinears + linear; }
  int embed_row() const { return kAdaptedLinears * layers; }
  int lm_head_row() const { return embed_row() + 1; }
};

}  // namespace refit
