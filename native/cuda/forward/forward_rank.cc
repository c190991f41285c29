#include "cuda/forward/forward_rank.h"

#include <algorithm>

#include "cuda/attention/attention.h"
#include "cuda/device/check.h"
#include "cuda/forward/elementwise.h"
#include "cuda/sampler/sampler.h"

namespace refit::cuda {

RankForward::RankForward(const CoreConfig& config, const Layout& layout, const ForwardShape& shape, Rank& rank,
                         const ForwardMemory& memory, const RankBuffers& own, const std::vector<float>& rope,
                         std::unique_ptr<Exchange> exchange)
    : layout_(layout),
      shape_(shape),
      rank_(rank),
      params_(memory.params),
      kv_(static_cast<Element*>(memory.kv)),
      pages_(config.pages),
      page_size_(config.page_size),
      own_(own),
      exchange_(std::move(exchange)),
      gemm_(own_.gemm, own_.gemm_bytes, config.deterministic ? SumOrder::kAscending : SumOrder::kAny),
      adapters_(layout, params_.front(), own_.shrunk, rank.stream),
      graphs_(rank, config.graphs, config.sets) {
  if (exchange_) gemm_.require_loaded();
  for (const LayerParams& layer : layout.layers) {
    if (layer.sparse()) moe_.try_emplace(layer.inter, moe_shape(layout, layer.inter), gemm_, own_.moe, own_.moe_bytes);
  }
  reserve(kFirstBlock, kFirstResults);
  rank.doing("upload the RoPE table");
  check(cudaMemcpyAsync(own_.rope, rope.data(), rope.size() * sizeof(float), cudaMemcpyHostToDevice, rank.stream),
        "upload the RoPE table");
  check(cudaStreamSynchronize(rank.stream), "upload the RoPE table");
}

void RankForward::reserve(size_t block_bytes, size_t result_bytes) {
  rank_.doing("make room for a step");
  graphs_.clear();
  block_.reserve(block_bytes, "memory for the step's block");
  if (rank_.index == 0) results_.reserve(result_bytes, "memory for the step's results");
}

void RankForward::load_for_tokens(int tokens, int set) {
  set_ = set;
  rank_.doing("load the kernels of a step");
  const cudaStream_t stream = rank_.stream;
  const auto rows = static_cast<int>(shape_.product_rows(tokens));
  for (int layer = 0; layer < layout_.recipe.layers; ++layer) {
    const LayerParams& p = layout_.layers[layer];
    gemm_.load(qkv(layer, rows), stream);
    gemm_.load(o(layer, rows), stream);
    if (p.sparse()) {
      moe_.at(p.inter).load(linear_input(), param(p.router), tokens, stream);
    } else {
      gemm_.load(gate_up(layer, rows), stream);
      gemm_.load(down(layer, rows), stream);
    }
  }
  check(cudaStreamSynchronize(stream), "load the kernels of a step");
}

void RankForward::load_for_rows(int rows, int set) {
  set_ = set;
  rank_.doing("load the kernels of a step's head");
  gemm_.load(lm_head(rows), rank_.stream);
  check(cudaStreamSynchronize(rank_.stream), "load the kernels of a step's head");
}

uint64_t RankForward::in_layers(const Layout& layout, int64_t tokens) {
  uint64_t calls = 1;  // of the embedding
  for (const LayerParams& layer : layout.layers) {
    const int64_t mlp = !layout.gathers ? 1 : layer.sparse() ? Moe::gathers(tokens) : 2;
    calls += (layout.gathers ? 2 : 1) + (layout.recipe.qk_norm == QkNorm::kProjection ? 1 : 0) + mlp;
  }
  return calls;
}

uint64_t RankForward::collectives(const Layout& layout, const ForwardShape& shape, int64_t tokens, int64_t rows) {
  if (layout.ranks == 1) return 0;
  const int64_t blocks = (rows + shape.rows - 1) / shape.rows;
  return in_layers(layout, tokens) + (blocks > 0 ? 2 * static_cast<uint64_t>(blocks) - 1 : 0);
}

StepView RankForward::view(const PreparedStep& step) const {
  StepView view = step.block.view(block_.data());
  view.attention.parts = own_.parts;
  return view;
}

bool RankForward::wants_graph(const PreparedStep& step) const {
  return exchange_ && may_use_graphs(step) && graphs_.wants(step.room);
}

void RankForward::make_graph(const PreparedStep& step) {
  const StepView view = this->view(step);
  graphs_.make(step.room, [&](int set) {
    if (exchange_) exchange_->begin_step(view.epoch);
    layers(view, step, set);
  });
}

void RankForward::run(const PreparedStep& step) {
  const cudaStream_t stream = rank_.stream;
  const StepView view = this->view(step);
  if (exchange_) exchange_->begin_step(view.epoch);
  rank_.begin_op("copy in");
  check(
      cudaMemcpyAsync(block_.data(), step.host_block, rank_.index == 0 ? step.block.bytes() : step.block.shared_bytes(),
                      cudaMemcpyHostToDevice, stream),
      "copy in");
  // A rank alone makes a graph while its GPU computes the same step: no token waits for it.
  const bool makes_graph = !exchange_ && may_use_graphs(step) && graphs_.wants(step.room);
  if (may_use_graphs(step)) {
    graphs_.run(step.room, step.set, [&](int set) { layers(view, step, set); });
    if (exchange_) exchange_->launched(in_layers(layout_, step.room.tokens));
  } else {
    layers(view, step, step.set);
  }
  set_ = step.set;
  head(view, step);
  if (rank_.index == 0 && step.results.bytes() > 0) {
    rank_.begin_op("copy out");
    check(cudaMemcpyAsync(step.host_results, results_.data(), step.results.bytes(), cudaMemcpyDeviceToHost, stream),
          "copy out");
  }
  if (exchange_) return exchange_->wait();
  if (makes_graph) make_graph(step);
  rank_.doing("wait for the step");
  check(cudaStreamSynchronize(stream), "the step");
}

void RankForward::layers(const StepView& view, const PreparedStep& step, int set) {
  set_ = set;
  adapters_.begin(view.adapters, step.room.tokens);
  embed_tokens(view, step.room.tokens);
  for (int layer = 0; layer < layout_.recipe.layers; ++layer) {
    attend(view, layer, step.room.tokens);
    mlp(view, layer, step);
  }
}

void RankForward::sum(int layer, int64_t elements, Element* out) {
  if (!exchange_) return;
  exchange_->sum(side_, layer, out, elements);
  side_ ^= 1;
}

void RankForward::gather(int layer, int64_t rows, int64_t own, Element* all) {
  exchange_->gather(side_, layer, all, rows, own);
  side_ ^= 1;
}

void RankForward::finish_delta(int layer, int64_t rows) {
  if (layout_.gathers) {
    gather(layer, rows, layout_.outputs, own_.delta);
  } else {
    sum(layer, rows * layout_.recipe.hidden, own_.delta);
  }
}

KvLayer RankForward::kv_layer(int layer) const {
  const int64_t half = int64_t{pages_} * page_size_ * layout_.kv_heads * layout_.recipe.head_dim;
  Element* const k = kv_ + 2 * half * layer;
  return {k, k + half, pages_, page_size_, layout_.kv_heads, layout_.recipe.head_dim};
}

Product RankForward::qkv(int layer, int count) const {
  const LayerParams& p = layout_.layers[layer];
  const int64_t hidden = layout_.recipe.hidden, cols = layout_.qkv_cols();
  return {{count, cols, hidden, hidden, cols}, linear_input(), param(p.qkv), param(p.qkv_bias), own_.qkv};
}

Product RankForward::o(int layer, int count) const {
  const int64_t rows = layout_.outputs, cols = layout_.input_cols(layout_.q_cols());
  return {{count, rows, cols, cols, rows}, own_.attended, param(layout_.layers[layer].o), nullptr, part()};
}

Product RankForward::gate_up(int layer, int count) const {
  const LayerParams& p = layout_.layers[layer];
  const int64_t hidden = layout_.recipe.hidden, cols = 2 * p.inter;
  return {{count, cols, hidden, hidden, cols}, linear_input(), param(p.gate_up), nullptr, own_.gate_up};
}

Product RankForward::down(int layer, int count) const {
  const LayerParams& p = layout_.layers[layer];
  const int64_t rows = layout_.outputs, cols = layout_.input_cols(p.inter);
  return {{count, rows, cols, cols, rows}, own_.act, param(p.down), nullptr, part()};
}

// This rank's shard of the vocabulary.
Product RankForward::lm_head(int count) const {
  const int64_t hidden = layout_.recipe.hidden, cols = layout_.vocab_rows;
  float* const logits = exchange_ ? exchange_->logits() : own_.logits;
  return {{count, cols, hidden, hidden, shape_.logits_ld},
          own_.selected,
          param(layout_.lm_head),
          nullptr,
          logits + rank_.index * cols};
}

// Every step begins with the same side of the exchange: between two steps all ranks are idle.
void RankForward::embed_tokens(const StepView& view, int count) {
  const int hidden = layout_.recipe.hidden;
  side_ = 1;
  Element* const out = exchange_ ? part() : own_.hidden;
  rank_.begin_op("embed");
  embed(view.tokens, count, param(layout_.embed), rank_.index * layout_.vocab_rows, layout_.vocab_rows, hidden, out,
        rank_.stream);
  adapters_.embed(view.tokens, rank_.index * layout_.vocab_rows, layout_.vocab_rows, out);
  sum(-1, int64_t{count} * hidden, own_.hidden);
  if (layout_.recipe.norm_placement == NormPlacement::kPost) return;
  rank_.begin_op("ln1", 0);
  add_norm(own_.hidden, nullptr, nullptr, param(layout_.layers[0].ln1), layout_.recipe.rms_eps, count, hidden,
           own_.normed, rank_.stream, layout_.recipe.round_once);
}

HeadNorms RankForward::head_norms(int layer, int count) {
  const ModelRecipe& recipe = layout_.recipe;
  const LayerParams& p = layout_.layers[layer];
  HeadNorms norms{param(p.q_norm), param(p.k_norm), recipe.rms_eps};
  if (recipe.qk_norm != QkNorm::kProjection) return norms;
  const int64_t dim = recipe.head_dim;
  rank_.begin_op("squares of q and k", layer);
  Element* const pieces = exchange_ ? part() : own_.squares;
  // KV heads that several ranks hold count once.
  const bool counts_k = rank_.index % layout_.kv_replicas() == 0;
  const HeadSquares heads{recipe.head_dim,
                          recipe.heads,
                          rank_.index * layout_.heads,
                          layout_.heads,
                          layout_.first_kv_head(rank_.index),
                          counts_k ? layout_.kv_heads : 0};
  projection_squares(own_.qkv, layout_.qkv_cols(), heads, count, pieces, rank_.stream);
  sum(layer, int64_t{count} * recipe.heads * kSquarePieces, own_.squares);
  projection_rstd(own_.squares, recipe.heads, recipe.heads * dim, recipe.kv_heads * dim, recipe.rms_eps, count,
                  own_.rstd, rank_.stream);
  norms.q += rank_.index * layout_.q_cols();
  norms.k += layout_.first_kv_head(rank_.index) * dim;
  norms.rstd = own_.rstd;
  return norms;
}

void RankForward::add_delta(int bias, int own_norm, int next_norm, int count) {
  const ModelRecipe& recipe = layout_.recipe;
  if (recipe.norm_placement == NormPlacement::kPost) {
    norm_add(own_.hidden, own_.delta, param(bias), param(own_norm), recipe.rms_eps, count, recipe.hidden, rank_.stream,
             recipe.round_once);
  } else {
    add_norm(own_.hidden, own_.delta, param(bias), param(next_norm), recipe.rms_eps, count, recipe.hidden, own_.normed,
             rank_.stream, recipe.round_once);
  }
}

void RankForward::attend(const StepView& view, int layer, int count) {
  const LayerParams& p = layout_.layers[layer];
  const KvLayer kv = kv_layer(layer);
  const auto rows = static_cast<int>(shape_.product_rows(count));
  const cudaStream_t stream = rank_.stream;
  rank_.begin_op("qkv", layer);
  adapters_.start(adapters_.qkv(layer), linear_input());
  gemm_.run(qkv(layer, rows), adapters_.product_stream());
  adapters_.finish(adapters_.qkv(layer), own_.qkv, layout_.qkv_cols());
  const HeadNorms norms = head_norms(layer, count);
  rank_.begin_op("rope", layer);
  rope_and_cache(own_.qkv, norms, own_.rope, view.positions, view.slots, count, layout_.heads, kv, stream,
                 layout_.recipe.round_once);
  rank_.begin_op("attention", layer);
  attention(own_.qkv, layout_.qkv_cols(), view.attention, kv, layout_.heads, input_part(own_.attended), stream);
  if (layout_.gathers) gather(layer, count, layout_.q_cols(), own_.attended);
  rank_.begin_op("o", layer);
  adapters_.start(adapters_.o(layer), own_.attended);
  gemm_.run(o(layer, rows), adapters_.product_stream());
  adapters_.finish(adapters_.o(layer), part(), layout_.outputs);
  finish_delta(layer, count);
  rank_.begin_op("norm after attention", layer);
  add_delta(p.o_bias, p.ln1, p.ln2, count);
}

void RankForward::mlp(const StepView& view, int layer, const PreparedStep& step) {
  const LayerParams& p = layout_.layers[layer];
  const int count = step.room.tokens;
  const cudaStream_t stream = rank_.stream;
  if (p.sparse()) {
    rank_.begin_op("moe", layer);
    // All ranks choose the same experts: each has the whole router and the same sums.
    RouteRecord record;
    if (layout_.recorded > 0 && rank_.index == 0) {
      record = {step.results.experts(results_.data()) + p.sparse_index * layout_.recipe.experts_per_token,
                layout_.recorded};
    }
    const RowGather rows{[this] { return part(); },
                         [this, layer](Element* all, int64_t rows, int64_t own) { gather(layer, rows, own, all); }};
    const bool sums = layout_.ranks > 1 && !layout_.gathers;
    moe_.at(p.inter).run(linear_input(), param(p.router), param(p.w13), param(p.w2), sums ? part() : own_.delta, count,
                         sums, stream, record, adapters_.experts(layer, view.token_slots),
                         step.room.is_rounded ? view.slots : nullptr, layout_.gathers ? &rows : nullptr);
    if (sums) finish_delta(layer, count);
  } else {
    const auto rows = static_cast<int>(shape_.product_rows(count));
    rank_.begin_op("gate_up", layer);
    adapters_.start(adapters_.gate_up(layer), linear_input());
    gemm_.run(gate_up(layer, rows), adapters_.product_stream());
    rank_.begin_op("activation", layer);
    adapters_.finish_activated(adapters_.gate_up(layer), own_.gate_up, input_part(own_.act), count);
    if (layout_.gathers) gather(layer, count, p.inter, own_.act);
    rank_.begin_op("down", layer);
    adapters_.start(adapters_.down(layer), own_.act);
    gemm_.run(down(layer, rows), adapters_.product_stream());
    adapters_.finish(adapters_.down(layer), part(), layout_.outputs);
    finish_delta(layer, count);
  }
  // The next layer's norm; the final one is computed only for the rows that are sampled.
  const bool last = layer + 1 == layout_.recipe.layers;
  rank_.begin_op("norm after the MLP", layer);
  add_delta(-1, p.ln2, last ? -1 : layout_.layers[layer + 1].ln1, count);
}

// Every rank computes its shard of the vocabulary; rank 0 samples.
void RankForward::head(const StepView& view, const PreparedStep& step) {
  const cudaStream_t stream = rank_.stream;
  for (int begin = 0; begin < step.rows; begin += static_cast<int>(shape_.rows)) {
    const int count = std::min(static_cast<int>(shape_.rows), step.rows - begin);
    if (begin > 0 && exchange_) exchange_->next_logits();
    rank_.begin_op("norm");
    norm_rows(own_.hidden, view.row_tokens + begin, count, param(layout_.norm), layout_.recipe.rms_eps,
              layout_.recipe.hidden, own_.selected, stream, layout_.recipe.round_once);
    rank_.begin_op("lm_head");
    adapters_.begin(step.block.head_adapters(block_.data(), begin), count);
    adapters_.start(adapters_.lm_head(), own_.selected);
    const Product logits = lm_head(static_cast<int>(shape_.head_rows(count)));
    gemm_.run(logits, adapters_.product_stream());
    adapters_.finish(adapters_.lm_head(), static_cast<float*>(logits.y), shape_.logits_ld);
    if (exchange_) exchange_->gather_logits(count);
    if (rank_.index != 0) continue;
    rank_.begin_op("sample");
    sample(own_.logits, shape_.logits_ld, layout_.recipe.vocab, view.rows, begin, count, step.traits,
           step.results.view(results_.data()), own_.sampler, stream);
  }
}

}  // namespace refit::cuda
