#include "cpu/forward/forward_mlp.h"

namespace refit::cpu {
namespace {

// The most tokens that go through the MLP together. It bounds the memory of a long prefill; results do not depend on
// it.
constexpr int64_t kMlpRows = 1024;

// act(gate) * up of rows of [gate, up], each of `inter` columns, into rows of `ld`. In 16 bits the activation is
// rounded before it is multiplied by `up`; alone it is the product with ones.
void activate(const Context& ctx, float* gate_up, const float* ones, float* act, int64_t ld, int64_t rows,
              int64_t inter) {
  const auto activate_mul = ctx.activation == Activation::kSilu ? ctx.k.silu_mul : ctx.k.gelu_tanh_mul;
  for_blocks(ctx.pool, rows, 2 * inter, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      float* gate = gate_up + row * 2 * inter;
      float* up = gate + inter;
      float* out = act + row * ld;
      ctx.round(gate, 2 * inter);
      if (ctx.dtype == DType::kFloat32) {
        activate_mul(gate, up, out, inter);
        continue;
      }
      activate_mul(gate, ones, out, inter);
      ctx.round(out, inter);
      for (int64_t i = 0; i < inter; ++i) out[i] *= up[i];
      ctx.round(out, inter);
    }
  });
}

}  // namespace

void gated_mlp(const Context& ctx, const Layout& layout, int64_t inter, const float* x,
               const std::vector<MlpWeights>& weights, const std::vector<float*>& y, int64_t rows, MlpScratch& scratch,
               const MlpAdapters* adapters) {
  const int64_t most = std::min(rows, kMlpRows), hidden = layout.recipe.hidden, all = layout.ranks * inter;
  float* wide = scratch.gate_up.get(most * 2 * inter);
  float* act = scratch.act.get(most * all);
  float* ones = scratch.ones.get(inter);
  std::fill_n(ones, inter, 1.0f);
  for (int64_t begin = 0; begin < rows; begin += kMlpRows) {
    const int64_t count = std::min(kMlpRows, rows - begin);
    const float* in = x + begin * hidden;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      ctx.k.gemm(ctx.pool, in, hidden, weights[rank].gate_up, ctx.dtype, nullptr, wide, 2 * inter, count, 2 * inter,
                 hidden);
      if (adapters != nullptr) {
        const auto& [own, layer, expert, slots] = *adapters;
        own.add(ctx, rank, own.gate_up(layer, expert), in, hidden, wide, 2 * inter, slots + begin, count);
      }
      activate(ctx, wide, ones, act + rank * inter, all, count, inter);
    }
    for (int rank = 0; rank < layout.ranks; ++rank) {
      const OutputProduct at = output_product(layout, rank, act, inter, y);
      float* const out = at.y + begin * hidden;
      ctx.k.gemm(ctx.pool, at.x, all, weights[rank].down, ctx.dtype, nullptr, out, hidden, count, layout.outputs,
                 at.depth);
      if (adapters != nullptr) {
        const auto& [own, layer, expert, slots] = *adapters;
        own.add(ctx, rank, own.down(layer, expert), at.x, all, out, hidden, slots + begin, count);
      }
    }
  }
}

}  // namespace refit::cpu
