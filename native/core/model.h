// What the native core knows of a model: sizes, and a list of named matrices. The mapping from checkpoint names to
// these matrices is TypeScript's (src/model); nothing here knows a checkpoint.
//
// Parameters of one rank, by name (local shapes; nq, nkv, I, V are per rank; a vector is [n, 1]). They are found by
// name, and lie in memory in the order of the list that they come in:
//   embed            [V, H]            rows past the vocabulary are zero
//   layers.L.qkv     [(nq + 2 nkv) * hd, H]
//   layers.L.qkv_bias [(nq + 2 nkv) * hd, 1]  optional
//   layers.L.o       [H, nq * hd]
//   layers.L.o_bias  [H, 1]            optional, added once after the ranks are summed
//   layers.L.q_norm, layers.L.k_norm [hd, 1]  optional
//   layers.L.gate_up [2 I, H]          gate rows, then up rows (dense layers)
//   layers.L.down    [H, I]
//   layers.L.w13     [E * 2 I_e, H]    sparse layers; per expert: gate rows, then up rows
//   layers.L.w2      [E * H, I_e]      per expert: H rows
//   layers.L.router  [E, H]
//   layers.L.ln1     [H, 1]            RMSNorm before attention
//   layers.L.ln2     [H, 1]            RMSNorm before the MLP
//   norm             [H, 1]
//   lm_head          [V, H]            absent when tied: then embed serves
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
};

struct Arch {
  int hidden = 0;
  int layers = 0;
  int heads = 0;     // of the whole model
  int kv_heads = 0;  // of the whole model; a rank holds max(1, kv_heads / ranks)
  int head_dim = 0;
  int vocab = 0;
  float rms_eps = 1e-6f;
  std::vector<double> rope_inv_freq;  // [head_dim / 2]
  double rope_scale = 1.0;
  std::vector<uint8_t> sparse_layers;  // [layers]
  int experts = 0;
  int experts_per_token = 0;
  bool norm_topk_prob = false;
};

struct CoreConfig {
  std::string device = "cpu";  // or "cuda"
  int ranks = 1;
  int threads = 1;
  DType dtype = DType::kBFloat16;
  std::string isa;  // empty: the best
  Arch arch;
  std::vector<Param> params;
  int pages = 0;
  int page_size = 16;
  bool record_experts = false;  // steps tell which experts each token went to (StepResult::experts)

  // CUDA alone.
  std::vector<int> gpus;        // of each rank, ordinals of the runtime; empty: 0, 1, ...
  bool share_gpus = false;      // for tests: several ranks on one card
  double watchdog_seconds = 0;  // 0: $REFIT_WATCHDOG_SECONDS, else 60
  // The most that one step brings, and the most tokens that a sequence grows to; 0: the forward pass's defaults.
  int max_step_tokens = 0;
  int max_step_sequences = 0;
  int max_context = 0;
};

}  // namespace refit
