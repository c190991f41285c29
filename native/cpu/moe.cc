#include "cpu/moe.h"

#include <algorithm>
#include <cmath>

namespace refit::cpu {
namespace {

// The k largest of p[0, n), best first, ties to the lower index; a NaN is never preferred to a number.
void top_k(const float* p, int n, int k, int32_t* ids) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    int at = count;
    while (at > 0 && (p[i] > p[ids[at - 1]] || (std::isnan(p[ids[at - 1]]) && !std::isnan(p[i])))) --at;
    if (at == k) continue;
    if (count < k) ++count;
    for (int j = count - 1; j > at; --j) ids[j] = ids[j - 1];
    ids[at] = i;
  }
}

}  // namespace

void Moe::route(const Context& ctx, const LayerParams& layer, const float* x, int64_t rows) {
  const int experts = model_.recipe.experts, k = model_.recipe.experts_per_token, hidden = model_.recipe.hidden;
  float* logits = logits_.get(rows * experts);
  ctx.k.gemm(ctx.pool, x, hidden, model_.at(0, layer.router), ctx.dtype, nullptr, logits, experts, rows, experts,
             hidden);
  chosen_.resize(rows * k);
  weights_.resize(rows * k);
  for_blocks(ctx.pool, rows, experts * 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* p = logits + row * experts;
      ctx.round(p, experts);
      const float sum = ctx.k.exp_sum(p, ctx.k.max(p, experts), experts);
      for (int e = 0; e < experts; ++e) p[e] /= sum;
      int32_t* ids = chosen_.data() + row * k;
      float* weights = weights_.data() + row * k;
      top_k(p, experts, k, ids);
      float total = 0.0f;
      for (int i = 0; i < k; ++i) total += weights[i] = p[ids[i]];
      if (model_.recipe.norm_topk_prob) {
        for (int i = 0; i < k; ++i) weights[i] /= total;
      }
      ctx.round(weights, k);
    }
  });
  by_expert_.resize(experts);
  for (auto& list : by_expert_) list.clear();
  for (int64_t row = 0; row < rows; ++row) {
    for (int i = 0; i < k; ++i)
      by_expert_[chosen_[row * k + i]].push_back({static_cast<int32_t>(row), weights_[row * k + i]});
  }
}

void Moe::run(const Context& ctx, const LayerParams& layer, int index, const float* x, float* y, int64_t rows,
              Adapters& adapters, uint16_t* record, int64_t stride) {
  route(ctx, layer, x, rows);
  for (int64_t row = 0; record != nullptr && row < rows; ++row) {
    const int32_t* ids = chosen_.data() + row * model_.recipe.experts_per_token;
    std::copy_n(ids, model_.recipe.experts_per_token, record + row * stride);
  }
  const int64_t hidden = model_.recipe.hidden;
  std::fill_n(y, rows * hidden, 0.0f);
  for (int e = 0; e < model_.recipe.experts; ++e) {
    const std::vector<Choice>& tokens = by_expert_[e];
    const int64_t count = static_cast<int64_t>(tokens.size());
    if (count == 0) continue;
    float* in = gathered_.get(count * hidden);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + tokens[i].token * hidden, hidden, in + i * hidden);
    slots_.resize(adapters.active() ? count : 0);
    for (size_t i = 0; i < slots_.size(); ++i) slots_[i] = adapters.slots()[tokens[i].token];
    std::vector<MlpWeights> weights;
    std::vector<float*> parts;
    float* const sum = sum_.get((model_.gathers ? 1 : model_.ranks) * count * hidden);
    for (int rank = 0; rank < model_.ranks; ++rank) {
      weights.push_back(
          {model_.at(rank, layer.w13, e * 2 * layer.inter), model_.at(rank, layer.w2, e * model_.outputs)});
      if (rank == 0 || !model_.gathers) parts.push_back(sum + rank * count * hidden);
    }
    const MlpAdapters own{adapters, index, e, slots_.data()};
    gated_mlp(ctx, model_, layer.inter, in, weights, parts, count, mlp_, adapters.active() ? &own : nullptr);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      for (int64_t i = 0; i < count * hidden; ++i) sum[i] += parts[rank][i];
    }
    for_blocks(ctx.pool, count, hidden, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        float* from = sum + i * hidden;
        float* to = y + tokens[i].token * hidden;
        ctx.round(from, hidden);
        for (int64_t j = 0; j < hidden; ++j) from[j] *= tokens[i].weight;
        ctx.round(from, hidden);
        for (int64_t j = 0; j < hidden; ++j) to[j] += from[j];
        ctx.round(to, hidden);
      }
    });
  }
}

}  // namespace refit::cpu
