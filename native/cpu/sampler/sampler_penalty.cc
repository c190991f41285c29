#include "cpu/sampler/sampler_penalty.h"

namespace refit::cpu {

void apply_penalties(float* logits, std::span<const int32_t> history, int prompt, const Penalties& penalties,
                     std::vector<int32_t>& counts) {
  if (penalties.none()) return;
  for (const int32_t token : history.subspan(prompt)) ++counts[token];
  for (const int32_t token : history) {
    const int32_t count = counts[token];
    if (count < 0) continue;  // done
    counts[token] = -1;
    float z = logits[token];
    z = z > 0.0f ? z / penalties.repetition : z * penalties.repetition;
    if (count > 0) z -= static_cast<float>(count) * penalties.frequency + penalties.presence;
    logits[token] = z;
  }
  for (const int32_t token : history) counts[token] = 0;
}

void apply_bias(float* logits, std::span<const int32_t> tokens, std::span<const float> values) {
  for (size_t i = 0; i < tokens.size(); ++i) logits[tokens[i]] += values[i];
}

}  // namespace refit::cpu
