// LoRA adapters on the CPU (core/adapters.h): y += scale * B (A x) for the tokens of each slot. A x is rounded like an
// activation, the product with B is added in fp32 before the base linear's own rounding. As in all kernels here, a
// row's result does not depend on the other rows.
#pragma once
#include <vector>

#include "core/step.h"
#include "cpu/forward/forward_common.h"
#include "cpu/forward/forward_model.h"

namespace refit::cpu {

// One linear with adapters, fused from slices that each have a row in the table, an A and their own output columns.
struct AdaptedSlices {
  AdapterPair pair;
  int64_t in = 0;                    // columns of A
  int64_t a_rows = 0, b_rows = 0;    // of one slot
  int64_t a_first = 0, b_first = 0;  // this linear's first rows in a slot (experts)
  struct Slice {
    int row;       // in the slot's part of the table
    int64_t cols;  // output columns
  };
  std::vector<Slice> slices;
};

class Adapters {
 public:
  explicit Adapters(const Model& model) : model_(model) {}

  // Reads the slots of a batch's tokens.
  void begin(const StepBatch& batch);
  // Some token of the batch has an adapter.
  bool active() const { return active_; }
  // [T]; -1 for the base model.
  const int32_t* slots() const { return slots_.data(); }

  // y: [rows, ldy] with all slices' columns, x: [rows, ldx]. slots: [rows].
  void add(const Context& ctx, int rank, const AdaptedSlices& linear, const float* x, int64_t ldx, float* y,
           int64_t ldy, const int32_t* slots, int64_t rows);
  // h: [T, hidden], the embeddings of the batch's tokens.
  void add_embeddings(const Context& ctx, const StepBatch& batch, float* h);

  AdaptedSlices qkv(int layer) const;
  AdaptedSlices o(int layer) const;
  // A dense MLP, or one expert.
  AdaptedSlices gate_up(int layer, int expert) const;
  AdaptedSlices down(int layer, int expert) const;
  AdaptedSlices lm_head(int64_t cols) const;

 private:
  struct Shape {
    float scale;
    int rank;
  };
  Shape shape(int slot, int row) const;
  // y[rows, cols] += scale * t B, where t is [rows, slot rank].
  void expand(const Context& ctx, const float* t, const void* b, float scale, float* y, int64_t ldy, int64_t rows,
              int64_t cols);

  const Model& model_;
  bool active_ = false;
  std::vector<int32_t> slots_;
  Buffer shrunk_, delta_;
};

}  // namespace refit::cpu
