// One forward step: StepBatch, whose fields are views that the binding makes, and the result. src/native/step.ts
// documents the fields.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace refit {

constexpr int kRowInts = 7;
constexpr int kRowFloats = 6;
constexpr int kRowWantLogprob = 1;
constexpr int kRowRawLogprob = 2;
constexpr int kRowWantKept = 4;
// A larger kept set is counted, but its ids are not reported.
constexpr int kMostKept = 8192;

// Most steps that have begun and are not collected (Device::begin).
constexpr size_t kMostBegun = 2;

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
  std::span<const uint32_t> masks;
  std::span<const int32_t> adapters;
  int set = 0;  // of the weights that compute it

  int sequences() const { return static_cast<int>(start_pos.size()); }
  int rows() const { return static_cast<int>(row_seeds.size()); }
  // The adapter slot of a sequence; -1 for the base model.
  int adapter(int sequence) const { return adapters.empty() ? -1 : adapters[sequence]; }
};

// A token below 0 stands for the one that a row of the step before gives: row ~token.
inline bool is_fed(int32_t token) { return token < 0; }
inline int32_t fed_row(int32_t token) { return ~token; }

// Words of one mask of allowed tokens.
constexpr size_t mask_words(int vocab) { return (static_cast<size_t>(vocab) + 31) / 32; }

struct StepResult {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> id_logprobs;
  // With CoreConfig::record_experts [T, sparse layers, experts per token]: the experts of each token, best first.
  std::vector<uint16_t> experts;
  // Per row, empty if no row has kRowWantKept: the size of the kept set, and the token's logprob within it.
  std::vector<int32_t> kept_counts;
  std::vector<float> kept_logprobs;
  // Flat, best first: the kept sets of at most kMostKept tokens.
  std::vector<int32_t> kept_ids;
};

inline bool wants_kept(const StepBatch& batch, int row) {
  const int32_t* ints = batch.row_ints.data() + static_cast<size_t>(row) * kRowInts;
  return (ints[4] & kRowWantKept) != 0 && ints[1] < 0;
}

// Most ids of a row's kept set that are reported.
inline int kept_room(const StepBatch& batch, int row, int vocab) {
  if (!wants_kept(batch, row)) return 0;
  const int top_k = batch.row_ints[static_cast<size_t>(row) * kRowInts + 2];
  return std::min({top_k > 0 ? top_k : vocab, vocab, kMostKept});
}

}  // namespace refit
