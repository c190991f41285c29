#include "core/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace refit {
namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("bad configuration: " + what);
}

std::string shape_of(int64_t rows, int64_t cols) {
  return std::string("[") + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

class Names {
 public:
  explicit Names(const CoreConfig& config) : params_(config.params), dtype_(config.dtype) {
    const std::vector<Param>& params = config.params;
    for (size_t i = 0; i < params.size(); ++i) {
      require(ids_.emplace(params[i].name, static_cast<int>(i)).second,
              "parameter " + params[i].name + " is listed twice");
    }
  }
  // As `needed`, in float32 whatever the forward pass computes in.
  int needed_float(const std::string& name, int64_t rows, int64_t cols) const {
    const Param& p = needed(name);
    require(p.rows == rows && p.cols == cols && p.dtype == DType::kFloat32,
            "parameter " + name + " is " + shape_of(p.rows, p.cols) + " " + name_of(p.dtype) + ", expected " +
                shape_of(rows, cols) + " float32");
    return find(name);
  }
  int find(const std::string& name) const {
    const auto it = ids_.find(name);
    return it == ids_.end() ? -1 : it->second;
  }
  int needed(const std::string& name, int64_t rows, int64_t cols) const {
    const Param& p = needed(name);
    require(p.rows == rows && p.cols == cols,
            "parameter " + name + " is " + shape_of(p.rows, p.cols) + ", expected " + shape_of(rows, cols));
    require(p.dtype == dtype_, std::string("parameter ") + name + " is " + name_of(p.dtype) +
                                   ", but the forward pass computes in " + name_of(dtype_));
    return find(name);
  }
  // A parameter that exists only with a flag of the recipe; -1 without the flag.
  int needed_if(bool flag, const std::string& name, int64_t rows, int64_t cols) const {
    if (flag) return needed(name, rows, cols);
    require(find(name) < 0, "parameter " + name + " is listed, but the recipe has no use for it");
    return -1;
  }
  const Param& needed(const std::string& name) const {
    const int id = find(name);
    require(id >= 0, "parameter " + name + " is missing");
    return params_[id];
  }

 private:
  const std::vector<Param>& params_;
  const DType dtype_;
  std::unordered_map<std::string, int> ids_;
};

// A and B of one linear's adapters; both or none.
AdapterPair adapter_pair(const Names& names, const std::string& name, int64_t a_rows, int64_t a_cols, int64_t b_rows,
                         int64_t b_cols) {
  const std::string a = "adapters." + name + "_a", b = "adapters." + name + "_b";
  if (names.find(a) < 0 && names.find(b) < 0) return {};
  return {names.needed(a, a_rows, a_cols), names.needed(b, b_rows, b_cols)};
}

void find_adapters(const Names& names, const Layout& m, int layer, LayerParams& p) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const int64_t s = m.adapters.slots, r = m.adapters.rank, h = m.recipe.hidden;
  p.qkv_adapter = adapter_pair(names, prefix + "qkv", s * 3 * r, h, s * m.qkv_cols(), r);
  p.o_adapter = adapter_pair(names, prefix + "o", s * r, m.input_cols(m.q_cols()), s * m.outputs, r);
  const int64_t e = p.sparse() ? m.recipe.experts : 1;
  const char* const gate_up = p.sparse() ? "w13" : "gate_up";
  const char* const down = p.sparse() ? "w2" : "down";
  p.gate_up_adapter = adapter_pair(names, prefix + gate_up, s * e * 2 * r, h, s * e * 2 * p.inter, r);
  p.down_adapter = adapter_pair(names, prefix + down, s * e * r, m.input_cols(p.inter), s * e * m.outputs, r);
}

LayerParams layer_params(const Names& names, const Layout& m, int layer, bool sparse) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const int64_t h = m.recipe.hidden, hd = m.recipe.head_dim;
  LayerParams p;
  p.ln1 = names.needed(prefix + "ln1", h, 1);
  p.qkv = names.needed(prefix + "qkv", m.qkv_cols(), h);
  p.qkv_bias = names.needed_if(m.recipe.qkv_bias, prefix + "qkv_bias", m.qkv_cols(), 1);
  const bool has_norms = m.recipe.qk_norm != QkNorm::kNone, is_whole = m.recipe.qk_norm == QkNorm::kProjection;
  p.q_norm = names.needed_if(has_norms, prefix + "q_norm", is_whole ? m.recipe.heads * hd : hd, 1);
  p.k_norm = names.needed_if(has_norms, prefix + "k_norm", is_whole ? m.recipe.kv_heads * hd : hd, 1);
  p.o = names.needed(prefix + "o", m.outputs, m.input_cols(m.q_cols()));
  p.o_bias = names.needed_if(m.recipe.o_bias, prefix + "o_bias", h, 1);
  p.ln2 = names.needed(prefix + "ln2", h, 1);
  if (!sparse) {
    p.inter = names.needed(prefix + "gate_up").rows / 2;
    p.gate_up = names.needed(prefix + "gate_up", 2 * p.inter, h);
    p.down = names.needed(prefix + "down", m.outputs, m.input_cols(p.inter));
    return p;
  }
  const int64_t e = m.recipe.experts;
  require(e > 0 && m.recipe.experts_per_token > 0 && m.recipe.experts_per_token <= e,
          "a sparse layer needs 1 <= experts_per_token (" + std::to_string(m.recipe.experts_per_token) +
              ") <= experts (" + std::to_string(e) + ")");
  p.router = names.needed(prefix + "router", e, h);
  p.inter = names.needed(prefix + "w13").rows / (2 * e);
  p.w13 = names.needed(prefix + "w13", e * 2 * p.inter, h);
  p.w2 = names.needed(prefix + "w2", e * m.outputs, m.input_cols(p.inter));
  return p;
}

}  // namespace

Layout::Layout(const CoreConfig& config) : recipe(config.recipe), ranks(config.ranks) {
  require(ranks > 0, "ranks must be positive");
  require(recipe.hidden > 0 && recipe.layers > 0 && recipe.heads > 0 && recipe.kv_heads > 0 && recipe.head_dim > 0 &&
              recipe.vocab > 0,
          "hidden, layers, heads, kv_heads, head_dim and vocab must be positive");
  require(recipe.head_dim % 2 == 0, "head_dim " + std::to_string(recipe.head_dim) + " is odd; RoPE rotates halves");
  require(recipe.rope_inv_freq.size() == static_cast<size_t>(recipe.head_dim / 2),
          "rope_inv_freq has " + std::to_string(recipe.rope_inv_freq.size()) +
              " entries, expected head_dim / 2 = " + std::to_string(recipe.head_dim / 2));
  require(recipe.sparse_layers.size() == static_cast<size_t>(recipe.layers),
          "sparse_layers has " + std::to_string(recipe.sparse_layers.size()) + " entries for " +
              std::to_string(recipe.layers) + " layers");
  require(recipe.heads % recipe.kv_heads == 0, "heads " + std::to_string(recipe.heads) +
                                                   " is not a multiple of kv_heads " + std::to_string(recipe.kv_heads));
  require(recipe.heads % ranks == 0,
          "heads " + std::to_string(recipe.heads) + " do not divide among " + std::to_string(ranks) + " ranks");
  require(recipe.kv_heads % ranks == 0 || ranks % recipe.kv_heads == 0,
          "kv_heads " + std::to_string(recipe.kv_heads) + " neither divide among " + std::to_string(ranks) +
              " ranks nor replicate evenly");
  heads = recipe.heads / ranks;
  kv_heads = std::max(1, recipe.kv_heads / ranks);
  group = heads / kv_heads;

  gathers = config.deterministic && ranks > 1;
  require(!gathers || recipe.hidden % ranks == 0,
          "hidden " + std::to_string(recipe.hidden) + " does not divide among " + std::to_string(ranks) + " ranks");
  outputs = gathers ? recipe.hidden / ranks : recipe.hidden;

  const Names names(config);
  vocab_rows = names.needed("embed").rows;
  embed = names.needed("embed", vocab_rows, recipe.hidden);
  require(vocab_rows > 0 && vocab_rows * ranks >= recipe.vocab,
          "embed holds " + std::to_string(vocab_rows) + " rows on each of " + std::to_string(ranks) +
              " ranks, fewer than the vocabulary of " + std::to_string(recipe.vocab));
  norm = names.needed("norm", recipe.hidden, 1);
  lm_head = names.needed_if(!recipe.tied_head, "lm_head", vocab_rows, recipe.hidden);
  if (recipe.tied_head) lm_head = embed;
  for (int layer = 0; layer < recipe.layers; ++layer) {
    layers.push_back(layer_params(names, *this, layer, recipe.sparse_layers[layer] != 0));
    if (layers.back().sparse()) layers.back().sparse_index = sparse_layers++;
  }
  adapters = {config.adapter_slots, config.adapter_rank, -1, {}, {}, recipe.layers};
  if (adapters.slots > 0) {
    const int64_t s = adapters.slots, r = adapters.rank;
    require(r > 0 && r % kAdapterRankMultiple == 0,
            "the rank of adapter slots is " + std::to_string(r) + ", expected a positive multiple of 16");
    adapters.table = names.needed_float("adapters.table", s * adapters.rows_of_slot(), 2);
    adapters.embed = adapter_pair(names, "embed", s * vocab_rows, r, s * recipe.hidden, r);
    adapters.lm_head = adapter_pair(names, "lm_head", s * r, recipe.hidden, s * vocab_rows, r);
    for (int layer = 0; layer < recipe.layers; ++layer) find_adapters(names, *this, layer, layers[layer]);
  }
  if (!config.record_experts) return;
  require(recipe.experts <= 1 << 15, std::to_string(recipe.experts) + " experts; at most 32768 can be recorded");
  recorded = int64_t{sparse_layers} * recipe.experts_per_token;
}

}  // namespace refit
