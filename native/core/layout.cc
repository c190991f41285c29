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
  explicit Names(const std::vector<Param>& params) : params_(params) {
    for (size_t i = 0; i < params.size(); ++i) {
      require(ids_.emplace(params[i].name, static_cast<int>(i)).second,
              "parameter " + params[i].name + " is listed twice");
    }
  }
  int find(const std::string& name) const {
    const auto it = ids_.find(name);
    return it == ids_.end() ? -1 : it->second;
  }
  int optional(const std::string& name, int64_t rows, int64_t cols) const {
    const int id = find(name);
    if (id >= 0) {
      const Param& p = params_[id];
      require(p.rows == rows && p.cols == cols,
              "parameter " + name + " is " + shape_of(p.rows, p.cols) + ", expected " + shape_of(rows, cols));
    }
    return id;
  }
  int needed(const std::string& name, int64_t rows, int64_t cols) const {
    const int id = optional(name, rows, cols);
    require(id >= 0, "parameter " + name + " is missing");
    return id;
  }
  const Param& needed(const std::string& name) const {
    const int id = find(name);
    require(id >= 0, "parameter " + name + " is missing");
    return params_[id];
  }

 private:
  const std::vector<Param>& params_;
  std::unordered_map<std::string, int> ids_;
};

LayerParams layer_params(const Names& names, const Layout& m, int layer, bool sparse) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const int64_t h = m.arch.hidden, hd = m.arch.head_dim;
  LayerParams p;
  p.ln1 = names.needed(prefix + "ln1", h, 1);
  p.qkv = names.needed(prefix + "qkv", m.qkv_cols(), h);
  p.qkv_bias = names.optional(prefix + "qkv_bias", m.qkv_cols(), 1);
  p.q_norm = names.optional(prefix + "q_norm", hd, 1);
  p.k_norm = names.optional(prefix + "k_norm", hd, 1);
  p.o = names.needed(prefix + "o", h, m.q_cols());
  p.o_bias = names.optional(prefix + "o_bias", h, 1);
  p.ln2 = names.needed(prefix + "ln2", h, 1);
  if (!sparse) {
    p.inter = names.needed(prefix + "gate_up").rows / 2;
    p.gate_up = names.needed(prefix + "gate_up", 2 * p.inter, h);
    p.down = names.needed(prefix + "down", h, p.inter);
    return p;
  }
  const int64_t e = m.arch.experts;
  require(e > 0 && m.arch.experts_per_token > 0 && m.arch.experts_per_token <= e,
          "a sparse layer needs 1 <= experts_per_token (" + std::to_string(m.arch.experts_per_token) +
              ") <= experts (" + std::to_string(e) + ")");
  p.router = names.needed(prefix + "router", e, h);
  p.inter = names.needed(prefix + "w2").cols;
  p.w13 = names.needed(prefix + "w13", e * 2 * p.inter, h);
  p.w2 = names.needed(prefix + "w2", e * h, p.inter);
  return p;
}

}  // namespace

Layout::Layout(const CoreConfig& config) : arch(config.arch), ranks(config.ranks) {
  require(ranks > 0, "ranks must be positive");
  require(
      arch.hidden > 0 && arch.layers > 0 && arch.heads > 0 && arch.kv_heads > 0 && arch.head_dim > 0 && arch.vocab > 0,
      "hidden, layers, heads, kv_heads, head_dim and vocab must be positive");
  require(arch.head_dim % 2 == 0, "head_dim " + std::to_string(arch.head_dim) + " is odd; RoPE rotates halves");
  require(arch.rope_inv_freq.size() == static_cast<size_t>(arch.head_dim / 2),
          "rope_inv_freq has " + std::to_string(arch.rope_inv_freq.size()) +
              " entries, expected head_dim / 2 = " + std::to_string(arch.head_dim / 2));
  require(arch.sparse_layers.size() == static_cast<size_t>(arch.layers),
          "sparse_layers has " + std::to_string(arch.sparse_layers.size()) + " entries for " +
              std::to_string(arch.layers) + " layers");
  require(arch.heads % arch.kv_heads == 0,
          "heads " + std::to_string(arch.heads) + " is not a multiple of kv_heads " + std::to_string(arch.kv_heads));
  require(arch.heads % ranks == 0,
          "heads " + std::to_string(arch.heads) + " do not divide among " + std::to_string(ranks) + " ranks");
  require(arch.kv_heads % ranks == 0 || ranks % arch.kv_heads == 0,
          "kv_heads " + std::to_string(arch.kv_heads) + " neither divide among " + std::to_string(ranks) +
              " ranks nor replicate evenly");
  heads = arch.heads / ranks;
  kv_heads = std::max(1, arch.kv_heads / ranks);
  group = heads / kv_heads;

  const Names names(config.params);
  vocab_rows = names.needed("embed").rows;
  embed = names.needed("embed", vocab_rows, arch.hidden);
  require(vocab_rows > 0 && vocab_rows * ranks >= arch.vocab,
          "embed holds " + std::to_string(vocab_rows) + " rows on each of " + std::to_string(ranks) +
              " ranks, fewer than the vocabulary of " + std::to_string(arch.vocab));
  norm = names.needed("norm", arch.hidden, 1);
  lm_head = names.optional("lm_head", vocab_rows, arch.hidden);
  if (lm_head < 0) lm_head = embed;
  for (int layer = 0; layer < arch.layers; ++layer) {
    layers.push_back(layer_params(names, *this, layer, arch.sparse_layers[layer] != 0));
    if (layers.back().sparse()) layers.back().sparse_index = sparse_layers++;
  }
  if (!config.record_experts) return;
  require(arch.experts <= 1 << 15, std::to_string(arch.experts) + " experts; at most 32768 can be recorded");
  recorded = int64_t{sparse_layers} * arch.experts_per_token;
}

}  // namespace refit
