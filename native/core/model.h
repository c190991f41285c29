// The native core's view of a model: a recipe (sizes and flags), and a list of named matrices. TypeScript (src/model)
// maps checkpoint names to these matrices; nothing here knows a checkpoint.
//
// Parameters of one rank, by name (local shapes; nq, nkv, I, V are per rank; a vector is [n, 1]). They are found by
// name and are in memory in the order of the list. Each has its own dtype.
//   embed            [V, H]            rows past the vocabulary are zero
//   layers.L.qkv     [(nq + 2 nkv) * hd, H]
//   layers.L.qkv_bias [(nq + 2 nkv) * hd, 1]  with ModelRecipe::qkv_bias
//   layers.L.o       [H, nq * hd]
//   layers.L.o_bias  [H, 1]            with ModelRecipe::o_bias; added once after the ranks are summed
//   layers.L.q_norm, layers.L.k_norm   with ModelRecipe::qk_norm; every rank holds the whole vector:
//                    [hd, 1] for kHead, [all heads * hd, 1] and [all KV heads * hd, 1] for kProjection
//   layers.L.gate_up [2 I, H]          gate rows, then up rows (dense layers)
//   layers.L.down    [H, I]
//   layers.L.w13     [E * 2 I_e, H]    sparse layers; per expert: gate rows, then up rows
//   layers.L.w2      [E * H, I_e]      per expert: H rows
//   layers.L.router  [E, H]
//   layers.L.ln1     [H, 1]            RMSNorm of attention: before it, or after it (ModelRecipe::norm_placement)
//   layers.L.ln2     [H, 1]            RMSNorm of the MLP: before or after it, as ln1
//   norm             [H, 1]
//   lm_head          [V, H]            absent with ModelRecipe::tied_head: embed is used instead
//   adapters.*                         slots of LoRA adapters: core/adapters.h
// With Layout::gathers, o, down and w2 hold H / ranks of these rows (w2 of each expert), and the columns of all ranks.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace refit {

struct Param {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kBFloat16;
};

// False for the slots of adapters, which are no weights of the model.
inline bool is_weight(const Param& param) { return param.name.rfind("adapters.", 0) != 0; }

// RMSNorm before attention and MLP, or on their outputs before these are added to the residual stream.
enum class NormPlacement : uint8_t { kPre, kPost };

// RMSNorm of q and k before RoPE: none; on each head; on the whole projection, across the heads of all ranks.
enum class QkNorm : uint8_t { kNone, kHead, kProjection };

// The activation of gated MLPs: act(gate) * up. kGeluTanh is GELU's approximation by tanh.
enum class Activation : uint8_t { kSilu, kGeluTanh };

// The computation of a forward pass. The fields are those of ModelRecipe in src/native/recipe.ts, which documents them.
// The addon reads the list for_each_field (below).
struct ModelRecipe {
  int hidden = 0;
  int layers = 0;
  int heads = 0;     // of the whole model
  int kv_heads = 0;  // of the whole model; a rank holds max(1, kv_heads / ranks)
  int head_dim = 0;
  int vocab = 0;
  float rms_eps = 1e-6f;
  NormPlacement norm_placement = NormPlacement::kPre;
  QkNorm qk_norm = QkNorm::kNone;
  Activation activation = Activation::kSilu;
  // bf16 activations are rounded once at the end of a norm and of RoPE, not after each of their operations.
  bool round_once = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool tied_head = false;
  std::vector<double> rope_inv_freq;  // [head_dim / 2]
  double rope_scale = 1.0;
  std::vector<uint8_t> sparse_layers;  // [layers]
  int experts = 0;
  int experts_per_token = 0;
  bool norm_topk_prob = false;
};

// Calls visit(name in TypeScript, field) for every field. test/native/recipe.test.ts compares the names with those of
// the interface in TypeScript.
template <class Recipe, class Visit>
void for_each_field(Recipe& recipe, Visit&& visit) {
  visit("hiddenSize", recipe.hidden);
  visit("layers", recipe.layers);
  visit("heads", recipe.heads);
  visit("kvHeads", recipe.kv_heads);
  visit("headDim", recipe.head_dim);
  visit("vocabSize", recipe.vocab);
  visit("rmsNormEps", recipe.rms_eps);
  visit("normPlacement", recipe.norm_placement);
  visit("qkNorm", recipe.qk_norm);
  visit("activation", recipe.activation);
  visit("roundOnce", recipe.round_once);
  visit("qkvBias", recipe.qkv_bias);
  visit("oBias", recipe.o_bias);
  visit("tieWordEmbeddings", recipe.tied_head);
  visit("ropeInvFreq", recipe.rope_inv_freq);
  visit("ropeScale", recipe.rope_scale);
  visit("sparseLayers", recipe.sparse_layers);
  visit("experts", recipe.experts);
  visit("expertsPerToken", recipe.experts_per_token);
  visit("normTopkProb", recipe.norm_topk_prob);
}

constexpr int kMostSets = 2;

struct CoreConfig {
  std::string device = "cpu";  // or "cuda"
  int ranks = 1;
  int threads = 1;
  DType dtype = DType::kBFloat16;  // of activations and of the KV cache
  std::string isa;                 // empty: the best
  ModelRecipe recipe;
  std::vector<Param> params;
  int pages = 0;
  int page_size = 16;
  int sets = 1;  // of weights, at most kMostSets
  // Results depend neither on the batch, nor on how prompts are cut into steps, nor on the number of ranks.
  bool deterministic = false;
  bool record_experts = false;  // steps return the experts of each token (StepResult::experts)
  int adapter_slots = 0;        // LoRA adapters in memory at once (core/adapters.h), and the most rank of each
  int adapter_rank = 0;

  // CUDA only.
  std::vector<int> gpus;        // of each rank, ordinals of the runtime; empty: 0, 1, ...
  bool share_gpus = false;      // for tests: several ranks on one GPU
  double watchdog_seconds = 0;  // 0: $REFIT_WATCHDOG_SECONDS, else 60
  bool graphs = true;           // of decode steps
  // Bytes per second that a write to a set beside steps moves at most on each GPU; 0: no limit.
  double shadow_rate = 0;
  // Limits of one step, and the most tokens of a sequence; 0: the forward pass's defaults.
  int max_step_tokens = 0;
  int max_step_sequences = 0;
  int max_context = 0;
};

}  // namespace refit
