// Changes of logits before temperature: penalties of tokens that have occurred already, and logit bias.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace refit::cpu {

struct Penalties {
  float frequency = 0.0f, presence = 0.0f, repetition = 1.0f;
  bool none() const { return frequency == 0.0f && presence == 0.0f && repetition == 1.0f; }
};

// Repetition counts prompt and generated tokens (a positive logit is divided by it, a negative one multiplied), then
// frequency (times the count) and presence (once) are subtracted for generated tokens only. The first `prompt` tokens
// of history are the prompt. counts: [vocab] zeros, zero again on return.
void apply_penalties(float* logits, std::span<const int32_t> history, int prompt, const Penalties& penalties,
                     std::vector<int32_t>& counts);

// Logits of tokens whose bit of `mask` is clear become -infinity.
void apply_mask(float* logits, int vocab, std::span<const uint32_t> mask);

void apply_bias(float* logits, std::span<const int32_t> tokens, std::span<const float> values);

}  // namespace refit::cpu
