// The parameters of core/model.h, found by name and checked: which ids a layer uses, and which part of the model one
// rank holds.
#pragma once
#include <cstdint>
#include <vector>

#include "core/adapters.h"
#include "core/model.h"

namespace refit {

// Parameter ids; -1 where the model has none.
struct LayerParams {
  int ln1 = -1, qkv = -1, qkv_bias = -1, q_norm = -1, k_norm = -1, o = -1, o_bias = -1, ln2 = -1;
  int gate_up = -1, down = -1;         // dense
  int router = -1, w13 = -1, w2 = -1;  // sparse
  int64_t inter = 0;                   // per rank: of the MLP, or of one expert
  int sparse_index = -1;               // among the sparse layers; -1 for a dense one
  // Adapters of qkv, o, gate_up or w13, and down or w2.
  AdapterPair qkv_adapter, o_adapter, gate_up_adapter, down_adapter;
  bool sparse() const { return router >= 0; }
};

struct Layout {
  // Throws std::invalid_argument for sizes that do not divide, and for parameters that are missing, not of the recipe,
  // or of another shape or dtype than the forward pass reads.
  explicit Layout(const CoreConfig& config);

  const ModelRecipe recipe;
  int ranks;
  // Per rank.
  int heads, kv_heads, group;
  int64_t vocab_rows;
  // Whether ranks gather the inputs of o, down and w2 and each computes some of their outputs, so that one rank makes
  // every sum. Else each computes with the inputs that it has, and the ranks' partial sums are added.
  bool gathers;
  int64_t outputs;  // rows of o, down and every expert's w2
  int embed = -1, norm = -1, lm_head = -1;
  int sparse_layers = 0;
  int64_t recorded = 0;  // experts recorded of each token: sparse layers * experts per token, or 0
  std::vector<LayerParams> layers;
  AdapterLayout adapters;  // no slots: the model takes none

  // Neighbouring ranks that hold the same KV heads, and the first KV head of a rank.
  int kv_replicas() const { return ranks * kv_heads / recipe.kv_heads; }
  int first_kv_head(int rank) const { return rank / kv_replicas() * kv_heads; }
  // Columns of o, down or w2 if a rank computes `own` of their inputs.
  int64_t input_cols(int64_t own) const { return gathers ? ranks * own : own; }
  int64_t q_cols() const { return static_cast<int64_t>(heads) * recipe.head_dim; }
  int64_t kv_cols() const { return static_cast<int64_t>(kv_heads) * recipe.head_dim; }
  int64_t qkv_cols() const { return static_cast<int64_t>(heads + 2 * kv_heads) * recipe.head_dim; }
};

}  // namespace refit
