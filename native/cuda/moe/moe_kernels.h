// Launchers of the kernels of a mixture of experts. T tokens make P = T * k pairs of a token and an expert. Pairs are
// sorted by expert, then by token; a sorted pair is called a slot. The slots of one expert are cut into row tiles.
#pragma once
#include <algorithm>

#include "cuda/moe/moe.h"

namespace refit::cuda {

constexpr int kMaxExperts = 1024;
constexpr int kMaxPerToken = 32;

// The kernel of the products, and the number of multiprocessors of the GPU.
struct ExpertLaunch {
  ExpertKernel kernel;
  int processors;
};

struct RowTile {
  int32_t expert, first, rows;  // slots [first, first + rows)
};

// Upper bound of the number of row tiles: each expert in use has at most one that is not full.
constexpr int64_t max_row_tiles(int64_t pairs, int64_t experts, int64_t tile_rows) {
  return (pairs + std::min(experts, pairs) * (tile_rows - 1)) / tile_rows;
}

// Intermediate results between the kernels; all on the GPU.
struct MoeScratch {
  Element* logits;      // [T, experts]
  int32_t* ids;         // [T, k], ascending; -1: none
  float* weights;       // [T, k], of the same experts, rounded to Element
  int32_t* slots;       // [T, k]: the slot of each pair
  int32_t* tokens;      // [P], by slot
  RowTile* tiles;       // [max_row_tiles]
  int32_t* tile_count;  // one
  Element* act;         // [P, depth], by slot
  void* out;            // [P, outputs], by slot: Element, or float where sums are partial
  // With MoeShape::adapter_rank:
  Element* shrunk;  // [P, 2 rank], by slot: the products with A
  float* delta;     // [P, 2 inter], by slot: the adapters' part of gate and up; in the place of `out`
  size_t bytes;
};
// Divides `base` among the arrays for `tokens` tokens; `bytes` is the size that this takes.
MoeScratch carve_moe_scratch(const MoeShape& shape, int64_t tokens, void* base);

// logits -> ids, weights, and the record if there is one. kv_slots: see Moe::run; a token of padding gets ids of -1,
// and slots and weights of 0.
void choose_experts(const MoeShape& shape, const MoeScratch& scratch, int64_t count, cudaStream_t stream,
                    RouteRecord record = {}, const int32_t* kv_slots = nullptr);
// ids -> slots, tokens, tiles, tile_count. An expert's rows are divided among as few tiles as possible, evenly.
void sort_by_expert(const MoeShape& shape, const MoeScratch& scratch, int64_t count, int tile_rows,
                    cudaStream_t stream);
// x, w13 -> act [P, inter] = activation(gate) * up. The kernel's rows were given to sort_by_expert; all kernels but
// kTile64 need rows that begin at multiples of 16 bytes (moe_rows_aligned). adapted: act = activation(gate + delta) *
// (up + delta).
void expert_gate_up(const MoeShape& shape, const MoeScratch& scratch, const Element* x, const Element* w13,
                    int64_t count, const ExpertLaunch& launch, cudaStream_t stream, bool adapted = false);
// act, w2 -> out.
void expert_down(const MoeShape& shape, const MoeScratch& scratch, const Element* w2, int64_t count, bool partial,
                 const ExpertLaunch& launch, cudaStream_t stream);
// x, a13, b13 -> delta. tile_rows as given to sort_by_expert, here and below.
void adapt_gate_up(const MoeShape& shape, const MoeScratch& scratch, const MoeAdapters& adapters, const Element* x,
                   int64_t count, int tile_rows, cudaStream_t stream);
// act, a2, b2 -> added to out.
void adapt_down(const MoeShape& shape, const MoeScratch& scratch, const MoeAdapters& adapters, int64_t count,
                bool partial, int tile_rows, cudaStream_t stream);
// out, slots, weights -> y [T, outputs].
void combine_experts(const MoeShape& shape, const MoeScratch& scratch, Element* y, int64_t count, bool partial,
                     cudaStream_t stream);

// Whether all kernels can read these operands.
bool moe_rows_aligned(const MoeShape& shape, const Element* x, const Element* w13, const Element* w2);

// Loads the kernels onto the current GPU and sets their shared memory; call it before the first launch.
void prepare_moe_gemm();
void prepare_wgmma_experts();  // of compute capability 9.0
void prepare_moe_route();
void prepare_moe_adapters();

}  // namespace refit::cuda
