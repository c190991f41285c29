// One forward step: StepBatch, whose fields are views that the binding makes, and the result. src/native/step.ts
// documents the fields.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace refit {

constexpr int kRowInts = 6;
constexpr int kRowFloats = 6;
constexpr int kRowWantLogprob = 1;
constexpr int kRowRawLogprob = 2;

struct StepBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> seq_offsets;
  std::span<const int32_t> start_pos;
  std::span<const int32_t> page_offsets;
  std::span<const int32_t> pages;
  std::span<const int32_t> row_ints;
  std::span<const float> row_floats;
  std::span<const uint64_t> row_seeds;
  std::span<const int32_t> history_offsets;
  std::span<const int32_t> history;
  std::span<const int32_t> bias_offsets;
  std::span<const int32_t> bias_tokens;
  std::span<const float> bias_values;
  std::span<const int32_t> id_offsets;
  std::span<const int32_t> ids;

  int sequences() const { return static_cast<int>(start_pos.size()); }
  int rows() const { return static_cast<int>(row_seeds.size()); }
};

struct StepResult {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> id_logprobs;
  // With CoreConfig::record_experts [T, sparse layers, experts per token]: the experts of each token, best first.
  std::vector<uint16_t> experts;
};

}  // namespace refit
