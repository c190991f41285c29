#include "cpu/forward/forward_mlp.h"

namespace refit::cpu {
namespace {

// The most tokens that go through the MLP together. It bounds the memory of a long prefill; results do not depend on
// it.
constexpr int64_t kMlpRows = 1024;

}  // namespace

void gated_mlp(const Context& ctx, const float* x, const void* gate_up, const void* down, float* y, int64_t rows,
               int64_t hidden, int64_t inter, MlpScratch& scratch, const MlpAdapters* adapters) {
  const int64_t most = std::min(rows, kMlpRows);
  float* wide = scratch.gate_up.get(most * 2 * inter);
  float* act = scratch.act.get(most * inter);
  // the activation alone is the product with ones: in bf16 it is rounded before it is multiplied by `up`.
  const auto activate_mul = ctx.activation == Activation::kSilu ? ctx.k.silu_mul : ctx.k.gelu_tanh_mul;
  float* ones = scratch.ones.get(inter);
  std::fill_n(ones, inter, 1.0f);
  for (int64_t begin = 0; begin < rows; begin += kMlpRows) {
    const int64_t count = std::min(kMlpRows, rows - begin);
    ctx.k.gemm(ctx.pool, x + begin * hidden, hidden, gate_up, ctx.dtype, nullptr, wide, 2 * inter, count, 2 * inter,
               hidden);
    if (adapters != nullptr) {
      const auto& [own, rank, layer, expert, slots] = *adapters;
      own.add(ctx, rank, own.gate_up(layer, expert), x + begin * hidden, hidden, wide, 2 * inter, slots + begin, count);
    }
    for_blocks(ctx.pool, count, 2 * inter, [&](int64_t first, int64_t last, int) {
      for (int64_t row = first; row < last; ++row) {
        float* gate = wide + row * 2 * inter;
        float* up = gate + inter;
        float* out = act + row * inter;
        ctx.round(gate, 2 * inter);
        if (ctx.dtype != DType::kBFloat16) {
          activate_mul(gate, up, out, inter);
          continue;
        }
        activate_mul(gate, ones, out, inter);
        ctx.round(out, inter);
        for (int64_t i = 0; i < inter; ++i) out[i] *= up[i];
        ctx.round(out, inter);
      }
    });
    ctx.k.gemm(ctx.pool, act, inter, down, ctx.dtype, nullptr, y + begin * hidden, hidden, count, hidden, inter);
    if (adapters != nullptr) {
      const auto& [own, rank, layer, expert, slots] = *adapters;
      own.add(ctx, rank, own.down(layer, expert), act, inter, y + begin * hidden, hidden, slots + begin, count);
    }
  }
}

}  // namespace refit::cpu
