// The forward pass of all model families: the recipe (core/model.h) describes the computation of a layer.
//
// Virtual ranks are computed one after another, each with the parameters of a real rank. Their partial sums are added
// in rank order in fp32; if ranks gather (Layout::gathers), there are none. With bf16 parameters, activations are
// rounded where Hugging Face's bf16 modules hold bf16 tensors, with one exception: logits keep their fp32 accumulators.
#pragma once
#include <memory>
#include <vector>

#include "core/step.h"
#include "core/store.h"
#include "cpu/adapters.h"
#include "cpu/attention/attention.h"
#include "cpu/forward/forward_model.h"
#include "cpu/kv_cache.h"
#include "cpu/moe.h"
#include "cpu/rope.h"
#include "cpu/sampler/sampler.h"

namespace refit::cpu {

class Forward {
 public:
  // Throws std::invalid_argument. All references must outlive this object.
  Forward(const CoreConfig& config, const Store& store, const Kernels& kernels, Pool& pool);

  void step(const StepBatch& batch, StepResult& result);
  uint64_t kv_bytes() const { return cache_.bytes(); }
  // See KvCache::release. No step that reads old contents of the pages may run after it.
  uint64_t release_kv() { return cache_.release(); }

 private:
  void embed(const StepBatch& batch);
  void attend(const StepBatch& batch, int layer);
  // Norm and RoPE of q and k, and the cache's K and V.
  void prepare(const StepBatch& batch, int layer);
  // The norms of all heads of one token; q[rank] is the token's row. Only if the recipe has such norms.
  void norm_heads(float* q, const float* q_weight, const float* k_weight) const;
  void norm_projections(const std::vector<float*>& qkv, int64_t token, const float* q_weight,
                        const float* k_weight) const;
  void mlp(int layer, int64_t tokens, StepResult& result);
  void sample(const StepBatch& batch, StepResult& result);
  // The input of the next linear: normed_, or the residual stream itself if norms come after the linears
  // (NormPlacement::kPost).
  float* linear_input(int64_t tokens);
  // The n values of a vector parameter as floats, rank 0's; null if the model has none.
  const float* widened(int param, int64_t n, Buffer& buffer) const;

  Context ctx_;
  Model model_;
  KvCache cache_;
  Rope rope_;
  Attention attention_;
  Adapters adapters_;
  Moe moe_;
  Sampler sampler_;

  // Buffers of the current step. hidden_ [T, H] is the residual stream, normed_ [T, H] its norm (NormPlacement::kPre).
  Buffer hidden_, normed_, logits_, selected_;
  Buffer attended_;                  // [T, all heads' hd]
  std::vector<Buffer> qkv_, parts_;  // per rank: [T, (nq + 2 nkv) hd], [T, H]
  std::vector<Buffer> scratch_;      // per thread
  std::vector<int32_t> row_slots_;   // of the rows of logits
  Buffer norm_weight_, q_norm_, k_norm_, bias_;
  MlpScratch mlp_scratch_;
  struct Place {
    int32_t position, page, slot;
  };
  std::vector<Place> places_;  // of each token
};

}  // namespace refit::cpu
