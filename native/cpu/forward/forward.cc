#include "cpu/forward/forward.h"

#include <algorithm>

#include "core/step_check.h"
#include "cpu/norm.h"

namespace refit::cpu {
namespace {

// The most floats of logits in memory at once: a long prompt over a large vocabulary is scored in blocks of rows.
constexpr int64_t kLogitFloats = 8 << 20;

std::vector<float*> pointers(std::vector<Buffer>& buffers, int64_t floats) {
  std::vector<float*> out;
  for (Buffer& b : buffers) out.push_back(b.get(floats));
  return out;
}

}  // namespace

Forward::Forward(const CoreConfig& config, const Store& store, const Kernels& kernels, Pool& pool)
    : ctx_{kernels, pool, config.dtype, config.recipe.round_once, config.recipe.activation},
      model_(config, store),
      cache_(
          {config.ranks, config.recipe.layers, config.pages, config.page_size, model_.kv_heads, config.recipe.head_dim},
          config.dtype),
      rope_(config.recipe, config.dtype),
      attention_(model_, cache_, kernels),
      adapters_(model_),
      moe_(model_),
      sampler_(kernels, config.recipe.vocab, pool.threads()),
      qkv_(config.ranks),
      parts_(config.ranks),
      scratch_(pool.threads()) {}

const float* Forward::widened(int param, int64_t n, Buffer& buffer) const {
  if (param < 0) return nullptr;
  float* out = buffer.get(n);
  ctx_.widen(model_.at(0, param), out, n);
  return out;
}

void Forward::step(const StepBatch& batch, StepResult& result) {
  check_batch(batch, {model_.recipe.vocab, cache_.pages(), cache_.page_size(), model_.adapters.slots});
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size());
  model_.use(batch.set);
  result.experts.assign(tokens * model_.recorded, 0);
  adapters_.begin(batch);
  if (tokens > 0) {
    embed(batch);
    adapters_.add_embeddings(ctx_, batch, hidden_.get(0));
    attention_.plan(batch, ctx_.pool.threads());
    if (model_.recipe.norm_placement == NormPlacement::kPre) {
      add_and_norm(ctx_, hidden_.get(0), nullptr, 0, nullptr,
                   widened(model_.layers[0].ln1, model_.recipe.hidden, norm_weight_),
                   normed_.get(tokens * model_.recipe.hidden), tokens, model_.recipe.hidden, model_.recipe.rms_eps);
    }
    for (int layer = 0; layer < model_.recipe.layers; ++layer) {
      attend(batch, layer);
      mlp(layer, tokens, result);
    }
  }
  sample(batch, result);
}

float* Forward::linear_input(int64_t tokens) {
  const bool is_pre = model_.recipe.norm_placement == NormPlacement::kPre;
  return (is_pre ? normed_ : hidden_).get(tokens * model_.recipe.hidden);
}

void Forward::embed(const StepBatch& batch) {
  const int64_t hidden = model_.recipe.hidden, tokens = static_cast<int64_t>(batch.tokens.size());
  float* h = hidden_.get(tokens * hidden);
  places_.resize(tokens);
  int32_t furthest = 0;
  for (int s = 0; s < batch.sequences(); ++s) {
    for (int32_t t = batch.seq_offsets[s]; t < batch.seq_offsets[s + 1]; ++t) {
      const int32_t position = batch.start_pos[s] + (t - batch.seq_offsets[s]);
      const int32_t page = batch.pages[batch.page_offsets[s] + position / cache_.page_size()];
      places_[t] = {position, page, position % cache_.page_size()};
      furthest = std::max(furthest, position);
    }
  }
  rope_.reserve(int64_t{furthest} + 1);
  for_blocks(ctx_.pool, tokens, hidden, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = batch.tokens[t];
      ctx_.widen(model_.at(static_cast<int>(id / model_.vocab_rows), model_.embed, id % model_.vocab_rows),
                 h + t * hidden, hidden);
    }
  });
}

void Forward::norm_heads(float* q, const float* q_weight, const float* k_weight) const {
  const int dim = model_.recipe.head_dim;
  for (int i = 0; i < model_.heads + model_.kv_heads; ++i) {
    float* head = q + static_cast<int64_t>(i) * dim;
    rms_norm(ctx_, head, i < model_.heads ? q_weight : k_weight, head, dim, model_.recipe.rms_eps);
  }
}

// Squares are summed head by head, so a sum does not depend on the number of ranks. A KV head that several ranks hold
// counts once.
void Forward::norm_projections(const std::vector<float*>& qkv, int64_t token, const float* q_weight,
                               const float* k_weight) const {
  const int64_t cols = model_.qkv_cols(), q_cols = model_.q_cols(), k_cols = model_.kv_cols();
  const int dim = model_.recipe.head_dim;
  float q_squares = 0.0f, k_squares = 0.0f;
  for (int rank = 0; rank < model_.ranks; ++rank) {
    const float* q = qkv[rank] + token * cols;
    const bool counts_k = rank % model_.kv_replicas() == 0;
    for (int i = 0; i < model_.heads; ++i) q_squares += ctx_.k.sum_squares(q + i * dim, dim);
    for (int i = model_.heads; counts_k && i < model_.heads + model_.kv_heads; ++i)
      k_squares += ctx_.k.sum_squares(q + i * dim, dim);
  }
  const float q_rstd = rstd_of(q_squares, int64_t{model_.recipe.heads} * dim, model_.recipe.rms_eps);
  const float k_rstd = rstd_of(k_squares, int64_t{model_.recipe.kv_heads} * dim, model_.recipe.rms_eps);
  for (int rank = 0; rank < model_.ranks; ++rank) {
    float* q = qkv[rank] + token * cols;
    float* k = q + q_cols;
    scale(ctx_, q, q_rstd, q_weight + rank * q_cols, q, q_cols);
    scale(ctx_, k, k_rstd, k_weight + int64_t{model_.first_kv_head(rank)} * dim, k, k_cols);
  }
}

void Forward::prepare(const StepBatch& batch, int layer) {
  const LayerParams& p = model_.layers[layer];
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size()), cols = model_.qkv_cols();
  const int dim = model_.recipe.head_dim, rotated = model_.heads + model_.kv_heads;
  const bool is_whole = model_.recipe.qk_norm == QkNorm::kProjection;
  const float* q_norm = widened(p.q_norm, is_whole ? model_.recipe.heads * dim : dim, q_norm_);
  const float* k_norm = widened(p.k_norm, is_whole ? model_.recipe.kv_heads * dim : dim, k_norm_);
  const std::vector<float*> qkv = pointers(qkv_, tokens * cols);
  for_blocks(ctx_.pool, tokens, cols * model_.ranks, [&](int64_t begin, int64_t end, int thread) {
    float* tmp = scratch_[thread].get(2 * static_cast<int64_t>(rotated) * dim);
    for (int64_t t = begin; t < end; ++t) {
      const Place& place = places_[t];
      for (float* of_rank : qkv) ctx_.round(of_rank + t * cols, cols);
      if (is_whole) norm_projections(qkv, t, q_norm, k_norm);
      for (int rank = 0; rank < model_.ranks; ++rank) {
        float* q = qkv[rank] + t * cols;
        float* k = q + model_.q_cols();
        float* v = k + model_.kv_cols();
        if (model_.recipe.qk_norm == QkNorm::kHead) norm_heads(q, q_norm, k_norm);
        rope_.apply(ctx_, q, rotated, place.position, tmp);  // k follows q
        cache_.write(rank, layer, place.page, place.slot, k, v);
      }
    }
  });
}

void Forward::attend(const StepBatch& batch, int layer) {
  const LayerParams& p = model_.layers[layer];
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size()), hidden = model_.recipe.hidden;
  const int64_t cols = model_.qkv_cols(), q_cols = model_.q_cols();
  const std::vector<float*> qkv = pointers(qkv_, tokens * cols);
  float* const all = attended_.get(tokens * model_.ranks * q_cols);
  std::vector<float*> attended(model_.ranks);
  for (int rank = 0; rank < model_.ranks; ++rank) attended[rank] = all + rank * q_cols;
  const std::vector<float*> parts = pointers(parts_, tokens * hidden);
  float* input = linear_input(tokens);
  for (int rank = 0; rank < model_.ranks; ++rank) {
    const void* bias = p.qkv_bias >= 0 ? model_.at(rank, p.qkv_bias) : nullptr;
    ctx_.k.gemm(ctx_.pool, input, hidden, model_.at(rank, p.qkv), ctx_.dtype, bias, qkv[rank], cols, tokens, cols,
                hidden);
    if (adapters_.active()) {
      adapters_.add(ctx_, rank, adapters_.qkv(layer), input, hidden, qkv[rank], cols, adapters_.slots(), tokens);
    }
  }
  prepare(batch, layer);
  attention_.run(ctx_, layer, batch, qkv, cols, attended);
  for (int rank = 0; rank < model_.ranks; ++rank) {
    const OutputProduct o = output_product(model_, rank, all, q_cols, parts);
    const int64_t ld = model_.ranks * q_cols;
    ctx_.k.gemm(ctx_.pool, o.x, ld, model_.at(rank, p.o), ctx_.dtype, nullptr, o.y, hidden, tokens, model_.outputs,
                o.depth);
    if (adapters_.active()) {
      adapters_.add(ctx_, rank, adapters_.o(layer), o.x, ld, o.y, hidden, adapters_.slots(), tokens);
    }
  }
  const float* bias = widened(p.o_bias, hidden, bias_);
  const int summed = model_.gathers ? 1 : model_.ranks;
  if (model_.recipe.norm_placement == NormPlacement::kPost) {
    norm_and_add(ctx_, hidden_.get(0), parts.data(), summed, bias, widened(p.ln1, hidden, norm_weight_), tokens, hidden,
                 model_.recipe.rms_eps);
  } else {
    add_and_norm(ctx_, hidden_.get(0), parts.data(), summed, bias, widened(p.ln2, hidden, norm_weight_), input, tokens,
                 hidden, model_.recipe.rms_eps);
  }
}

void Forward::mlp(int layer, int64_t tokens, StepResult& result) {
  const LayerParams& p = model_.layers[layer];
  const int64_t hidden = model_.recipe.hidden;
  const std::vector<float*> parts = pointers(parts_, tokens * hidden);
  float* input = linear_input(tokens);
  int summed = model_.gathers ? 1 : model_.ranks;
  if (p.sparse()) {
    uint16_t* record = nullptr;
    if (model_.recorded > 0) record = result.experts.data() + p.sparse_index * model_.recipe.experts_per_token;
    moe_.run(ctx_, p, layer, input, parts[0], tokens, adapters_, record, model_.recorded);
    summed = 1;
  } else {
    std::vector<MlpWeights> weights;
    for (int rank = 0; rank < model_.ranks; ++rank)
      weights.push_back({model_.at(rank, p.gate_up), model_.at(rank, p.down)});
    const MlpAdapters own{adapters_, layer, 0, adapters_.slots()};
    gated_mlp(ctx_, model_, p.inter, input, weights, parts, tokens, mlp_scratch_, adapters_.active() ? &own : nullptr);
  }
  if (model_.recipe.norm_placement == NormPlacement::kPost) {
    norm_and_add(ctx_, hidden_.get(0), parts.data(), summed, nullptr, widened(p.ln2, hidden, norm_weight_), tokens,
                 hidden, model_.recipe.rms_eps);
    return;
  }
  // The next layer's norm; the final one is computed only for the rows that are sampled.
  const bool last = layer + 1 == model_.recipe.layers;
  const float* weight = last ? nullptr : widened(model_.layers[layer + 1].ln1, hidden, norm_weight_);
  add_and_norm(ctx_, hidden_.get(0), parts.data(), summed, nullptr, weight, input, tokens, hidden,
               model_.recipe.rms_eps);
}

void Forward::sample(const StepBatch& batch, StepResult& result) {
  sampler_.begin(batch, result);
  const int rows = batch.rows();
  if (rows == 0) return;
  const int64_t hidden = model_.recipe.hidden, vocab = model_.recipe.vocab;
  const int block = static_cast<int>(std::clamp<int64_t>(kLogitFloats / vocab, 32, 512));
  const float* norm = widened(model_.norm, hidden, norm_weight_);
  const float* h = hidden_.get(0);
  for (int begin = 0; begin < rows; begin += block) {
    const int count = std::min(block, rows - begin);
    float* x = selected_.get(count * hidden);
    float* logits = logits_.get(count * vocab);
    row_slots_.resize(adapters_.active() ? count : 0);
    for (int i = 0; i < count; ++i) {
      const int64_t token = batch.row_ints[static_cast<size_t>(begin + i) * kRowInts];
      rms_norm(ctx_, h + token * hidden, norm, x + i * hidden, hidden, model_.recipe.rms_eps);
      if (adapters_.active()) row_slots_[i] = adapters_.slots()[token];
    }
    for (int rank = 0; rank < model_.ranks; ++rank) {
      const int64_t first = rank * model_.vocab_rows, n = std::min(model_.vocab_rows, vocab - first);
      if (n <= 0) break;
      ctx_.k.gemm(ctx_.pool, x, hidden, model_.at(rank, model_.lm_head), ctx_.dtype, nullptr, logits + first, vocab,
                  count, n, hidden);
      if (adapters_.active()) {
        adapters_.add(ctx_, rank, adapters_.lm_head(n), x, hidden, logits + first, vocab, row_slots_.data(), count);
      }
    }
    const auto row = [&](int64_t i, int thread) {
      const int r = begin + static_cast<int>(i);
      const int32_t token = batch.row_ints[static_cast<size_t>(r) * kRowInts];
      sampler_.row(r, places_[token].position + 1, logits + i * vocab, thread);
    };
    ctx_.pool.parallel_for(count, row);
  }
  sampler_.end();
}

}  // namespace refit::cpu
