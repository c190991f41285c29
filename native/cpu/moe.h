// A mixture of experts in the order of Hugging Face's Qwen3Moe: each token's experts are summed by ascending expert id.
#pragma once
#include <vector>

#include "cpu/forward/forward_mlp.h"
#include "cpu/forward/forward_model.h"

namespace refit::cpu {

class Moe {
 public:
  explicit Moe(const Model& model) : model_(model) {}

  // index: the layer's number. x: [rows, hidden]. y: [rows, hidden], summed over experts and ranks, rounded. If
  // `record` is not null, the experts of row i are written to record[i * stride ...], best first.
  void run(const Context& ctx, const LayerParams& layer, int index, const float* x, float* y, int64_t rows,
           Adapters& adapters, uint16_t* record = nullptr, int64_t stride = 0);

 private:
  struct Choice {
    int32_t token;
    float weight;
  };

  void route(const Context& ctx, const LayerParams& layer, const float* x, int64_t rows);

  const Model& model_;
  std::vector<int32_t> chosen_;                 // [rows, experts_per_token]
  std::vector<float> weights_;                  // the same
  std::vector<std::vector<Choice>> by_expert_;  // tokens in order
  std::vector<int32_t> slots_;                  // adapter slots of one expert's tokens
  Buffer logits_, gathered_, sum_;              // sum_: of each rank
  MlpScratch mlp_;
};

}  // namespace refit::cpu
