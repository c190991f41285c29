#include "cpu/adapters.h"

#include <algorithm>

namespace refit::cpu {

void Adapters::begin(const StepBatch& batch) {
  active_ = false;
  if (batch.adapters.empty()) return;
  slots_.resize(batch.tokens.size());
  for (int s = 0; s < batch.sequences(); ++s) {
    const int slot = batch.adapter(s);
    active_ = active_ || slot >= 0;
    std::fill(slots_.begin() + batch.seq_offsets[s], slots_.begin() + batch.seq_offsets[s + 1], slot);
  }
}

Adapters::Shape Adapters::shape(int slot, int row) const {
  const AdapterLayout& adapters = model_.adapters;
  const int64_t at = static_cast<int64_t>(slot) * adapters.rows_of_slot() + row;
  const auto* const entry = static_cast<const float*>(model_.at(0, adapters.table, at));
  return {entry[0], static_cast<int>(entry[1])};
}

void Adapters::add(const Context& ctx, int rank, const AdaptedSlices& linear, const float* x, int64_t ldx, float* y,
                   int64_t ldy, const int32_t* slots, int64_t rows) {
  if (!linear.pair.exists()) return;
  const int64_t most = model_.adapters.rank;
  for (int64_t begin = 0, end = 0; begin < rows; begin = end) {
    const int slot = slots[begin];
    while (end < rows && slots[end] == slot) ++end;
    if (slot < 0) continue;
    const int64_t count = end - begin;
    int64_t col = 0, a = slot * linear.a_rows + linear.a_first;
    const int64_t b = slot * linear.b_rows + linear.b_first;
    for (const AdaptedSlices::Slice& slice : linear.slices) {
      const Shape adapter = shape(slot, slice.row);
      if (adapter.rank > 0) {
        float* t = shrunk_.get(count * most);
        ctx.k.gemm(ctx.pool, x + begin * ldx, ldx, model_.at(rank, linear.pair.a, a), ctx.dtype, nullptr, t, most,
                   count, adapter.rank, linear.in);
        for (int64_t i = 0; i < count; ++i) {
          ctx.round(t + i * most, adapter.rank);
          std::fill(t + i * most + adapter.rank, t + (i + 1) * most, 0.0f);
        }
        expand(ctx, t, model_.at(rank, linear.pair.b, b + col), adapter.scale, y + begin * ldy + col, ldy, count,
               slice.cols);
      }
      col += slice.cols;
      a += most;
    }
  }
}

void Adapters::expand(const Context& ctx, const float* t, const void* b, float scale, float* y, int64_t ldy,
                      int64_t rows, int64_t cols) {
  const int64_t most = model_.adapters.rank;
  float* delta = delta_.get(rows * cols);
  ctx.k.gemm(ctx.pool, t, most, b, ctx.dtype, nullptr, delta, cols, rows, cols, most);
  for_blocks(ctx.pool, rows, cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) ctx.k.axpy(scale, delta + i * cols, y + i * ldy, cols);
  });
}

void Adapters::add_embeddings(const Context& ctx, const StepBatch& batch, float* h) {
  const AdapterLayout& adapters = model_.adapters;
  if (!active_ || !adapters.embed.exists()) return;
  const int64_t most = adapters.rank, hidden = model_.recipe.hidden;
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  for (int64_t begin = 0, end = 0; begin < rows; begin = end) {
    const int slot = slots_[begin];
    while (end < rows && slots_[end] == slot) ++end;
    if (slot < 0) continue;
    const Shape adapter = shape(slot, adapters.embed_row());
    if (adapter.rank == 0) continue;
    float* t = shrunk_.get((end - begin) * most);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = batch.tokens[i], row = slot * model_.vocab_rows + id % model_.vocab_rows;
      float* const out = t + (i - begin) * most;
      ctx.widen(model_.at(static_cast<int>(id / model_.vocab_rows), adapters.embed.a, row), out, adapter.rank);
      std::fill(out + adapter.rank, out + most, 0.0f);
    }
    float* const y = h + begin * hidden;
    expand(ctx, t, model_.at(0, adapters.embed.b, slot * hidden), adapter.scale, y, hidden, end - begin, hidden);
    ctx.round(y, (end - begin) * hidden);
  }
}

AdaptedSlices Adapters::qkv(int layer) const {
  const AdapterLayout& adapters = model_.adapters;
  return {model_.layers[layer].qkv_adapter,
          model_.recipe.hidden,
          3 * int64_t{adapters.rank},
          model_.qkv_cols(),
          0,
          0,
          {{adapters.row(layer, kAdaptQ), model_.q_cols()},
           {adapters.row(layer, kAdaptK), model_.kv_cols()},
           {adapters.row(layer, kAdaptV), model_.kv_cols()}}};
}

AdaptedSlices Adapters::o(int layer) const {
  const AdapterLayout& adapters = model_.adapters;
  return {model_.layers[layer].o_adapter,
          model_.input_cols(model_.q_cols()),
          adapters.rank,
          model_.outputs,
          0,
          0,
          {{adapters.row(layer, kAdaptO), model_.outputs}}};
}

AdaptedSlices Adapters::gate_up(int layer, int expert) const {
  const AdapterLayout& adapters = model_.adapters;
  const LayerParams& p = model_.layers[layer];
  const int64_t copies = p.sparse() ? model_.recipe.experts : 1, rank = adapters.rank;
  return {p.gate_up_adapter,
          model_.recipe.hidden,
          copies * 2 * rank,
          copies * 2 * p.inter,
          expert * 2 * rank,
          expert * 2 * p.inter,
          {{adapters.row(layer, kAdaptGate), p.inter}, {adapters.row(layer, kAdaptUp), p.inter}}};
}

AdaptedSlices Adapters::down(int layer, int expert) const {
  const AdapterLayout& adapters = model_.adapters;
  const LayerParams& p = model_.layers[layer];
  const int64_t copies = p.sparse() ? model_.recipe.experts : 1, rank = adapters.rank;
  return {p.down_adapter,
          model_.input_cols(p.inter),
          copies * rank,
          copies * model_.outputs,
          expert * rank,
          expert * model_.outputs,
          {{adapters.row(layer, kAdaptDown), model_.outputs}}};
}

AdaptedSlices Adapters::lm_head(int64_t cols) const {
  const AdapterLayout& adapters = model_.adapters;
  return {
      adapters.lm_head, model_.recipe.hidden, adapters.rank, model_.vocab_rows, 0, 0, {{adapters.lm_head_row(), cols}}};
}

}  // namespace refit::cpu
