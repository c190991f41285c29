// Grouped-query attention over the paged KV cache.
//
// Keys are taken in blocks of kKeyBlock at absolute positions, with a running maximum and sum. The operations behind
// one output (token, head), and their order, depend only on the token's absolute position. The other tokens of the
// step, the chunks of a prompt and the places of its pages change no bit.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/step.h"
#include "cpu/attention/attention_tile.h"
#include "cpu/forward/forward_common.h"
#include "cpu/forward/forward_model.h"
#include "cpu/kv_cache.h"

namespace refit::cpu {

class Attention {
 public:
  Attention(const Model& model, const KvCache& cache, const Kernels& kernels);

  // Divides the work of a step into items, the same for every layer.
  void plan(const StepBatch& batch, int threads);
  // q: per rank [tokens, ldq], its first heads * head_dim columns after norm and RoPE; out: per rank [tokens, heads *
  // head_dim]. The K and V of the step's tokens are in the cache already.
  void run(const Context& ctx, int layer, const StepBatch& batch, const std::vector<float*>& q, int64_t ldq,
           const std::vector<float*>& out);

 private:
  // Some consecutive tokens of one sequence.
  struct Span {
    int sequence;
    int32_t begin, end;  // indices into the step's tokens
    int32_t position;    // absolute, of `begin`
  };
  struct Item {
    int span, rank, head;
  };

  void run_item(const Context& ctx, int layer, const StepBatch& batch, const Item& item, const float* q, int64_t ldq,
                float* out, Buffer& scratch) const;

  const Model& model_;
  const KvCache& cache_;
  const AttentionTile& tile_;
  int padded_dim_;
  std::vector<Span> spans_;
  std::vector<Buffer> scratch_;  // per thread
};

}  // namespace refit::cpu
