#include "cpu/sampler/sampler_penalty.h"

#include <algorithm>
#include <limits>

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

void apply_mask(float* logits, int vocab, std::span<const uint32_t> mask) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  for (int base = 0; base < vocab; base += 32) {
    const uint32_t allowed = mask[base / 32];
    const int end = std::min(32, vocab - base);
    if (allowed == 0) {
      std::fill_n(logits + base, end, kBanned);
    } else if (allowed != ~0u) {
      for (int i = 0; i < end; ++i) logits[base + i] = (allowed >> i & 1) != 0 ? logits[base + i] : kBanned;
    }
  }
}

void apply_bias(float* logits, std::span<const int32_t> tokens, std::span<const float> values) {
  for (size_t i = 0; i < tokens.size(); ++i) logits[tokens[i]] += values[i];
}

}  // namespace refit::cpu
