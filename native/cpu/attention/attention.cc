#include "cpu/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace refit::cpu {
namespace {

// Rows (token, head) of one item: enough to make widening a block of K and V once per item worth its cost.
constexpr int kItemRows = 96;

}  // namespace

const AttentionTile& attention_tile(const std::string& isa) {
#if defined(__x86_64__)
  if (isa.rfind("avx512", 0) == 0) return kAttentionAvx512;
  if (isa == "avx2") return kAttentionAvx2;
#endif
  (void)isa;
  return kAttentionScalar;
}

Attention::Attention(const Model& model, const KvCache& cache, const Kernels& kernels)
    : model_(model),
      cache_(cache),
      tile_(attention_tile(kernels.name)),
      padded_dim_((model.recipe.head_dim + kDimAlign - 1) / kDimAlign * kDimAlign) {}

void Attention::plan(const StepBatch& batch, int threads) {
  const int32_t step = std::max(1, kItemRows / model_.group);
  spans_.clear();
  for (int s = 0; s < batch.sequences(); ++s) {
    const int32_t first = batch.seq_offsets[s], last = batch.seq_offsets[s + 1];
    for (int32_t begin = first; begin < last; begin += step) {
      spans_.push_back({s, begin, std::min(last, begin + step), batch.start_pos[s] + (begin - first)});
    }
  }
  // Longest first, so that no thread gets a long item at the end. The order does not change the result.
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
    return (a.end - a.begin) * static_cast<int64_t>(a.position + 1) >
           (b.end - b.begin) * static_cast<int64_t>(b.position + 1);
  });
  scratch_.resize(threads);
}

void Attention::run(const Context& ctx, int layer, const StepBatch& batch, const std::vector<float*>& q, int64_t ldq,
                    const std::vector<float*>& out) {
  const int per_span = model_.ranks * model_.kv_heads;
  const auto item = [&](int64_t index, int thread) {
    const Item it{static_cast<int>(index / per_span), static_cast<int>(index % per_span) / model_.kv_heads,
                  static_cast<int>(index % per_span) % model_.kv_heads};
    run_item(ctx, layer, batch, it, q[it.rank], ldq, out[it.rank], scratch_[thread]);
  };
  ctx.pool.parallel_for(static_cast<int64_t>(spans_.size()) * per_span, item);
}

void Attention::run_item(const Context& ctx, int layer, const StepBatch& batch, const Item& item, const float* q,
                         int64_t ldq, float* out, Buffer& scratch) const {
  const Span& span = spans_[item.span];
  const int dim = model_.recipe.head_dim, group = model_.group, page_size = cache_.page_size();
  const int rows = (span.end - span.begin) * group;
  const bool bf16 = cache_.dtype() == DType::kBFloat16;
  const int32_t* pages = batch.pages.data() + batch.page_offsets[span.sequence];

  float* kt = scratch.get(static_cast<int64_t>(kKeyBlock) * (dim + padded_dim_) +
                          static_cast<int64_t>(rows) * (dim + padded_dim_ + 2));
  float* v = kt + static_cast<int64_t>(kKeyBlock) * dim;
  float* acc = v + static_cast<int64_t>(kKeyBlock) * padded_dim_;
  float* qs = acc + static_cast<int64_t>(rows) * padded_dim_;
  float* maxima = qs + static_cast<int64_t>(rows) * dim;
  float* sums = maxima + rows;

  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int r = 0; r < rows; ++r) {
    const float* from = q + (span.begin + r / group) * ldq + static_cast<int64_t>(item.head * group + r % group) * dim;
    for (int d = 0; d < dim; ++d) qs[r * dim + d] = from[d] * scale;
  }
  std::fill_n(acc, static_cast<int64_t>(rows) * padded_dim_, 0.0f);
  std::fill_n(maxima, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(sums, rows, 0.0f);

  const int32_t keys = span.position + (span.end - span.begin);  // number of keys that the last token sees
  for (int32_t block = 0; block < keys; block += kKeyBlock) {
    const int count = std::min(kKeyBlock, keys - block);
    for (int j = 0; j < count;) {
      const int page = pages[(block + j) / page_size], slot = (block + j) % page_size;
      const int n = std::min(count - j, page_size - slot);
      tile_.load_k(cache_.k(item.rank, layer, page, item.head), bf16, page_size, slot, n, dim, kt, j);
      tile_.load_v(
          cache_.v(item.rank, layer, page, item.head) + static_cast<int64_t>(slot) * dim * size_of(cache_.dtype()),
          bf16, n, dim, v + static_cast<int64_t>(j) * padded_dim_, padded_dim_);
      j += n;
    }
    alignas(64) float s[kTileRows * kKeyBlock];
    for (int r0 = 0; r0 < rows; r0 += kTileRows) {
      const int tile_rows = std::min(kTileRows, rows - r0);
      int counts[kTileRows];
      float alpha[kTileRows];
      for (int r = 0; r < tile_rows; ++r)
        counts[r] = std::clamp(span.position + (r0 + r) / group + 1 - block, 0, count);
      if (counts[tile_rows - 1] == 0) continue;
      tile_.scores(qs + static_cast<int64_t>(r0) * dim, tile_rows, dim, kt, counts[tile_rows - 1], s);
      for (int r = 0; r < tile_rows; ++r) {
        alpha[r] = 1.0f;
        if (counts[r] == 0) continue;
        float* row = s + r * kKeyBlock;
        const float before = maxima[r0 + r];
        const float now = std::max(before, ctx.k.max(row, counts[r]));
        if (now != before) alpha[r] = std::exp(before - now);
        maxima[r0 + r] = now;
        sums[r0 + r] = sums[r0 + r] * alpha[r] + ctx.k.exp_sum(row, now, counts[r]);
      }
      tile_.mix(s, alpha, counts, tile_rows, v, padded_dim_, acc + static_cast<int64_t>(r0) * padded_dim_);
    }
  }

  const int64_t ld = model_.ranks * model_.q_cols();
  for (int r = 0; r < rows; ++r) {
    float* to = out + (span.begin + r / group) * ld + static_cast<int64_t>(item.head * group + r % group) * dim;
    const float inverse = 1.0f / sums[r];
    for (int d = 0; d < dim; ++d) to[d] = acc[static_cast<int64_t>(r) * padded_dim_ + d] * inverse;
    ctx.round(to, dim);
  }
}

}  // namespace refit::cpu
