#include "cpu/forward/forward.h"

#include <algorithm>

#include "core/step_check.h"
#include "cpu/norm.h"

namespace refit::cpu {
namespace {

// Floats of logits held at once: scoring a long prompt over a large vocabulary is done in blocks of rows.
constexpr int64_t kLogitFloats = 8 << 20;

std::vector<float*> pointers(std::vector<Buffer>& buffers, int64_t floats) {
  std::vector<float*> out;
  for (Buffer& b : buffers) out.push_back(b.get(floats));
  return out;
}

}  // namespace

Forward::Forward(const CoreConfig& config, const Store& store, const Kernels& kernels, Pool& pool)
    : ctx_{kernels, pool, config.dtype},
      model_(config, store),
      cache_({config.ranks, config.arch.layers, config.pages, config.page_size, model_.kv_heads, config.arch.head_dim},
             config.dtype),
      rope_(config.arch, config.dtype),
      attention_(model_, cache_, kernels),
      moe_(model_),
      sampler_(kernels, config.arch.vocab, pool.threads()),
      qkv_(config.ranks),
      attended_(config.ranks),
      parts_(config.ranks),
      scratch_(pool.threads()) {}

const float* Forward::widened(int param, int64_t n, Buffer& buffer) const {
  if (param < 0) return nullptr;
  float* out = buffer.get(n);
  ctx_.widen(model_.at(0, param), out, n);
  return out;
}

void Forward::step(const StepBatch& batch, StepResult& result) {
  check_batch(batch, {model_.arch.vocab, cache_.pages(), cache_.page_size()});
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size());
  result.experts.assign(tokens * model_.recorded, 0);
  if (tokens > 0) {
    embed(batch);
    attention_.plan(batch, ctx_.pool.threads());
    add_and_norm(ctx_, hidden_.get(0), nullptr, 0, nullptr,
                 widened(model_.layers[0].ln1, model_.arch.hidden, norm_weight_),
                 normed_.get(tokens * model_.arch.hidden), tokens, model_.arch.hidden, model_.arch.rms_eps);
    for (int layer = 0; layer < model_.arch.layers; ++layer) {
      attend(batch, layer);
      mlp(layer, tokens, result);
    }
  }
  sample(batch, result);
}

void Forward::embed(const StepBatch& batch) {
  const int64_t hidden = model_.arch.hidden, tokens = static_cast<int64_t>(batch.tokens.size());
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

void Forward::prepare(const StepBatch& batch, int layer) {
  const LayerParams& p = model_.layers[layer];
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size()), cols = model_.qkv_cols();
  const int dim = model_.arch.head_dim, rotated = model_.heads + model_.kv_heads;
  const float* q_norm = widened(p.q_norm, dim, q_norm_);
  const float* k_norm = widened(p.k_norm, dim, k_norm_);
  const std::vector<float*> qkv = pointers(qkv_, tokens * cols);
  for_blocks(ctx_.pool, tokens, cols * model_.ranks, [&](int64_t begin, int64_t end, int thread) {
    float* tmp = scratch_[thread].get(2 * static_cast<int64_t>(rotated) * dim);
    for (int64_t t = begin; t < end; ++t) {
      const Place& place = places_[t];
      for (int rank = 0; rank < model_.ranks; ++rank) {
        float* q = qkv[rank] + t * cols;
        float* k = q + model_.q_cols();
        float* v = k + static_cast<int64_t>(model_.kv_heads) * dim;
        ctx_.round(q, cols);
        for (int i = 0; q_norm != nullptr && i < model_.heads; ++i)
          rms_norm(ctx_, q + i * dim, q_norm, q + i * dim, dim, model_.arch.rms_eps);
        for (int i = 0; k_norm != nullptr && i < model_.kv_heads; ++i)
          rms_norm(ctx_, k + i * dim, k_norm, k + i * dim, dim, model_.arch.rms_eps);
        rope_.apply(ctx_, q, rotated, place.position, tmp);  // k follows q
        cache_.write(rank, layer, place.page, place.slot, k, v);
      }
    }
  });
}

void Forward::attend(const StepBatch& batch, int layer) {
  const LayerParams& p = model_.layers[layer];
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size()), hidden = model_.arch.hidden;
  const int64_t cols = model_.qkv_cols(), q_cols = model_.q_cols();
  const std::vector<float*> qkv = pointers(qkv_, tokens * cols);
  const std::vector<float*> attended = pointers(attended_, tokens * q_cols);
  const std::vector<float*> parts = pointers(parts_, tokens * hidden);
  float* normed = normed_.get(tokens * hidden);
  for (int rank = 0; rank < model_.ranks; ++rank) {
    const void* bias = p.qkv_bias >= 0 ? model_.at(rank, p.qkv_bias) : nullptr;
    ctx_.k.gemm(ctx_.pool, normed, hidden, model_.at(rank, p.qkv), ctx_.dtype, bias, qkv[rank], cols, tokens, cols,
                hidden);
  }
  prepare(batch, layer);
  attention_.run(ctx_, layer, batch, qkv, cols, attended);
  for (int rank = 0; rank < model_.ranks; ++rank) {
    ctx_.k.gemm(ctx_.pool, attended[rank], q_cols, model_.at(rank, p.o), ctx_.dtype, nullptr, parts[rank], hidden,
                tokens, hidden, q_cols);
  }
  add_and_norm(ctx_, hidden_.get(0), parts.data(), model_.ranks, widened(p.o_bias, hidden, bias_),
               widened(p.ln2, hidden, norm_weight_), normed, tokens, hidden, model_.arch.rms_eps);
}

void Forward::mlp(int layer, int64_t tokens, StepResult& result) {
  const LayerParams& p = model_.layers[layer];
  const int64_t hidden = model_.arch.hidden;
  const std::vector<float*> parts = pointers(parts_, tokens * hidden);
  float* normed = normed_.get(tokens * hidden);
  int summed = model_.ranks;
  if (p.sparse()) {
    uint16_t* record = nullptr;
    if (model_.recorded > 0) record = result.experts.data() + p.sparse_index * model_.arch.experts_per_token;
    moe_.run(ctx_, p, normed, parts[0], tokens, record, model_.recorded);
    summed = 1;
  } else {
    for (int rank = 0; rank < model_.ranks; ++rank) {
      gated_mlp(ctx_, normed, model_.at(rank, p.gate_up), model_.at(rank, p.down), parts[rank], tokens, hidden, p.inter,
                mlp_scratch_);
    }
  }
  // The next layer's norm; the final one is taken only of the rows that are sampled.
  const bool last = layer + 1 == model_.arch.layers;
  const float* weight = last ? nullptr : widened(model_.layers[layer + 1].ln1, hidden, norm_weight_);
  add_and_norm(ctx_, hidden_.get(0), parts.data(), summed, nullptr, weight, normed, tokens, hidden,
               model_.arch.rms_eps);
}

void Forward::sample(const StepBatch& batch, StepResult& result) {
  sampler_.begin(batch, result);
  const int rows = batch.rows();
  if (rows == 0) return;
  const int64_t hidden = model_.arch.hidden, vocab = model_.arch.vocab;
  const int block = static_cast<int>(std::clamp<int64_t>(kLogitFloats / vocab, 32, 512));
  const float* norm = widened(model_.norm, hidden, norm_weight_);
  const float* h = hidden_.get(0);
  for (int begin = 0; begin < rows; begin += block) {
    const int count = std::min(block, rows - begin);
    float* x = selected_.get(count * hidden);
    float* logits = logits_.get(count * vocab);
    for (int i = 0; i < count; ++i) {
      const int64_t token = batch.row_ints[static_cast<size_t>(begin + i) * kRowInts];
      rms_norm(ctx_, h + token * hidden, norm, x + i * hidden, hidden, model_.arch.rms_eps);
    }
    for (int rank = 0; rank < model_.ranks; ++rank) {
      const int64_t first = rank * model_.vocab_rows, n = std::min(model_.vocab_rows, vocab - first);
      if (n <= 0) break;
      ctx_.k.gemm(ctx_.pool, x, hidden, model_.at(rank, model_.lm_head), ctx_.dtype, nullptr, logits + first, vocab,
                  count, n, hidden);
    }
    const auto row = [&](int64_t i, int thread) {
      const int r = begin + static_cast<int>(i);
      const int32_t token = batch.row_ints[static_cast<size_t>(r) * kRowInts];
      sampler_.row(r, places_[token].position + 1, logits + i * vocab, thread);
    };
    ctx_.pool.parallel_for(count, row);
  }
}

}  // namespace refit::cpu
