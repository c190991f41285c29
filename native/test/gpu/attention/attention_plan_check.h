// Checks that a plan of attention does all work of its step exactly once. Needs no GPU.
#pragma once
#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/step.h"
#include "cuda/attention/attention.h"
#include "test/check.h"
#include "test/gpu/attention/attention_kernels.h"

namespace refit::test {

struct PlanCase {
  std::vector<int32_t> seq_offsets{0}, start_pos, page_offsets{0}, tokens, row_ints;
  std::vector<uint64_t> row_seeds;
  StepBatch batch() const {
    StepBatch b;
    b.tokens = tokens;
    b.seq_offsets = seq_offsets;
    b.start_pos = start_pos;
    b.page_offsets = page_offsets;
    b.row_ints = row_ints;
    b.row_seeds = row_seeds;
    return b;
  }
  // samples: after each token.
  void add(int start, int count, bool samples = false) {
    for (int i = 0; samples && i < count; ++i) {
      row_ints.push_back(static_cast<int32_t>(tokens.size()) + i);
      row_ints.resize(row_ints.size() + kRowInts - 1);
      row_seeds.push_back(0);
    }
    tokens.resize(tokens.size() + count);
    seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
    start_pos.push_back(start);
    page_offsets.push_back(page_offsets.back() + (start + count + 15) / 16);
  }
};

inline void check_plan(const PlanCase& c, int group, int kv_heads, cuda::AttentionSplit split,
                       cuda::WideKernel wide = cuda::WideKernel::kMma) {
  const cuda::AttentionPlan plan = cuda::plan_attention(c.batch(), group, kv_heads, split, wide);
  CHECK(plan.wide == wide);
  const auto sequences = static_cast<int>(c.start_pos.size());
  const auto tokens = static_cast<int64_t>(c.tokens.size());
  std::vector<int32_t> sequence_of(tokens), position(tokens);
  int64_t context = 0;
  for (int s = 0; s < sequences; ++s) {
    for (int32_t t = c.seq_offsets[s]; t < c.seq_offsets[s + 1]; ++t) {
      sequence_of[t] = s;
      position[t] = c.start_pos[s] + (t - c.seq_offsets[s]);
      context = std::max<int64_t>(context, position[t] + 1);
    }
  }
  const std::vector<bool> samples_all = cuda::samples_all(c.batch());
  const auto is_narrow = [&](int s) { return samples_all[s] && group <= cuda::kNarrowRows; };
  // For every token and chunk that it sees: how often it is computed, and its part (-1: none).
  std::vector<std::vector<int>> times(tokens), parts(tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const int s = sequence_of[t];
    const int rows = is_narrow(s) ? group : (c.seq_offsets[s + 1] - c.seq_offsets[s]) * group;
    const int size = cuda::chunk_size(rows, wide);
    times[t].assign(position[t] / size + 1, 0);
    parts[t].assign(times[t].size(), -2);
  }
  std::vector<int> row_uses(plan.part_rows, 0);
  int wide_items = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const cuda::AttentionItem& item = plan.items[i];
    if (!CHECKF(item.tokens > 0 && item.first_token >= 0 && item.first_token + item.tokens <= tokens &&
                    item.chunk >= 0 && item.chunks > 0,
                "item %zu: tokens %d + %d, chunks %d + %d", i, item.first_token, item.tokens, item.chunk,
                item.chunks)) {
      return;
    }
    const int rows = item.tokens * group;
    CHECKF(rows <= cuda::rows_of(wide), "item %zu has %d rows", i, rows);
    wide_items += rows > cuda::kNarrowRows;
    CHECKF((rows > cuda::kNarrowRows) == (static_cast<int>(i) < plan.wide_items),
           "item %zu of %d wide ones has %d rows", i, plan.wide_items, rows);
    CHECK(!is_narrow(item.sequence) || rows <= cuda::kNarrowRows);
    CHECK(item.position == position[item.first_token] && item.old == c.start_pos[item.sequence]);
    CHECK(item.table == c.page_offsets[item.sequence]);
    CHECK(item.part >= 0 ? item.chunks == 1 : item.chunk == 0);
    // Its last token sees its last chunk.
    CHECK((item.position + item.tokens - 1) / cuda::chunk_size(rows, wide) >= item.chunk + item.chunks - 1);
    for (int j = 0; j < item.tokens; ++j) {
      const int t = item.first_token + j;
      CHECKF(sequence_of[t] == item.sequence, "item %zu of sequence %d has token %d of sequence %d", i, item.sequence,
             t, sequence_of[t]);
      for (int chunk = item.chunk; chunk < item.chunk + item.chunks; ++chunk) {
        if (chunk < static_cast<int>(times[t].size())) {
          times[t][chunk]++;
          parts[t][chunk] = item.part < 0 ? -1 : item.part + j;
        }
      }
      if (item.part >= 0 && CHECK(item.part + j < plan.part_rows)) row_uses[item.part + j]++;
    }
  }
  CHECK(wide_items == plan.wide_items);
  for (int uses : row_uses) CHECKF(uses == 1, "a row of partial results is written %d times", uses);

  std::vector<int> merged(tokens, 0);
  for (const cuda::AttentionMerge& merge : plan.merges) {
    CHECK(merge.parts > 1 && merge.part >= 0 && merge.part + merge.parts * merge.tokens <= plan.part_rows);
    for (int j = 0; j < merge.tokens; ++j) {
      const int t = merge.first_token + j;
      merged[t]++;
      CHECK(static_cast<size_t>(merge.parts) >= parts[t].size());
      for (size_t chunk = 0; chunk < parts[t].size(); ++chunk) {
        CHECKF(parts[t][chunk] == merge.part + static_cast<int>(chunk) * merge.tokens + j,
               "token %d, chunk %zu: part %d, merged from %d", t, chunk, parts[t][chunk],
               merge.part + static_cast<int>(chunk) * merge.tokens + j);
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const bool direct = parts[t][0] == -1;
    CHECKF(merged[t] == (direct ? 0 : 1), "token %lld is merged %d times", static_cast<long long>(t), merged[t]);
    for (size_t chunk = 0; chunk < times[t].size(); ++chunk) {
      CHECKF(times[t][chunk] == 1, "token %lld at %d, chunk %zu: computed %d times", static_cast<long long>(t),
             position[t], chunk, times[t][chunk]);
      CHECK((parts[t][chunk] == -1) == direct);
    }
  }
  CHECK(static_cast<int64_t>(plan.merges.size()) <= tokens);
  if (split != cuda::AttentionSplit::kAlways) {
    const int64_t most = cuda::max_part_rows(tokens, sequences, context);
    CHECKF(plan.part_rows <= most, "%d rows of partial results, at most %lld were promised", plan.part_rows,
           static_cast<long long>(most));
    CHECK(static_cast<int64_t>(plan.items.size()) <= cuda::max_attention_items(tokens, sequences, context));
  }
  if (split == cuda::AttentionSplit::kNever) CHECK(plan.part_rows == 0 && plan.merges.empty());
}

inline void check_plans(uint64_t seed) {
  using cuda::AttentionSplit;
  std::mt19937_64 rng(seed);
  const auto below = [&rng](int n) { return static_cast<int>(rng() % n); };
  for (int round = 0; round < 400; ++round) {
    PlanCase c;
    const int sequences = below(round % 8 == 0 ? 100 : 6), kind = below(4);
    for (int s = 0; s < sequences; ++s) {
      // Lengths around the borders of chunks and tiles, and others.
      const int start = below(3) == 0 ? cuda::kAttentionChunk * below(5) + below(3) : below(kind == 0 ? 20 : 5000);
      const int some = kind == 3 ? 1 + below(cuda::kSampledTokens + 2) : 1 + below(below(3) == 0 ? 900 : 70);
      c.add(below(4) == 0 ? 0 : start, kind == 1 || below(2) == 0 ? 1 + below(2) : some, kind == 3 && below(8) > 0);
    }
    const int group = below(5) == 0 ? 1 + below(64) : 1 << below(5), kv_heads = 1 << below(4);
    for (AttentionSplit split : {AttentionSplit::kAuto, AttentionSplit::kAlways, AttentionSplit::kNever}) {
      for (const auto wide : kWideKernels) check_plan(c, group, kv_heads, split, wide);
    }
  }
  // One long sequence is divided among blocks; a batch that occupies a GPU is not.
  PlanCase alone, many;
  alone.add(100000, 1);
  for (int i = 0; i < 64; ++i) many.add(4095, 1);
  CHECK(cuda::plan_attention(alone.batch(), 4, 8).merges.size() == 1);
  CHECK(cuda::plan_attention(many.batch(), 4, 8).merges.empty());
  check_plan(alone, 4, 8, AttentionSplit::kAuto);
  check_plan(many, 4, 8, AttentionSplit::kAuto);
  CHECK(cuda::max_part_rows(1 << 20, 1, 1 << 20) == cuda::max_part_rows(1 << 20, 1, int64_t{1} << 40));
  CHECK_THROWS(cuda::plan_attention(alone.batch(), 65), std::invalid_argument);
  CHECK_THROWS(cuda::plan_attention(alone.batch(), 0), std::invalid_argument);
}

}  // namespace refit::test
