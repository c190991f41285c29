#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/attention/attention.h"

namespace refit::cuda {
namespace {

// Number of blocks that occupies a large GPU: two on each of 132 multiprocessors, or one of the Hopper kernel.
constexpr int64_t kFillingBlocks = 264, kFillingHopperBlocks = 132;
// Limits the memory of partial results. 8192 rows are 64 decoding sequences of 32k tokens; items that do not fit are
// not split.
constexpr int64_t kMaxPartRows = 8192;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Adjacent tokens of one sequence.
struct Tile {
  int32_t sequence, first_token, tokens, position;

  int64_t keys() const { return static_cast<int64_t>(position) + tokens; }
  bool wide(int group) const { return tokens * group > kNarrowRows; }
};

// A sequence of more than one tile is cut evenly, so that no tile is narrow: a prefill is then one launch.
void cut_sequence(const StepBatch& batch, int sequence, int most_tokens, std::vector<Tile>& tiles) {
  const int32_t first = batch.seq_offsets[sequence], count = batch.seq_offsets[sequence + 1] - first;
  const int64_t pieces = ceil_div(count, most_tokens);
  for (int64_t i = 0; i < pieces; ++i) {
    const auto begin = static_cast<int32_t>(i * count / pieces), end = static_cast<int32_t>((i + 1) * count / pieces);
    tiles.push_back({sequence, first + begin, end - begin, batch.start_pos[sequence] + begin});
  }
}

}  // namespace

AttentionPlan plan_attention(const StepBatch& batch, int group, int kv_heads, AttentionSplit split, int wide_rows) {
  if (group < 1 || group > kWideRows) {
    throw std::invalid_argument("attention: " + std::to_string(group) + " query heads per KV head, expected 1 to " +
                                std::to_string(kWideRows));
  }
  std::vector<Tile> tiles;
  for (int s = 0; s < batch.sequences(); ++s) cut_sequence(batch, s, wide_rows / group, tiles);
  std::stable_sort(tiles.begin(), tiles.end(), [group](const Tile& a, const Tile& b) {
    if (a.wide(group) != b.wide(group)) return a.wide(group);
    return a.keys() > b.keys();
  });

  // Work is counted in keys: a narrow tile waits for memory about as long as a wide one computes.
  int64_t work = 0;
  for (const Tile& tile : tiles) work += tile.keys() * kv_heads;
  AttentionPlan plan;
  plan.wide_rows = wide_rows;
  int64_t rows = 0;
  for (const Tile& tile : tiles) {
    const int32_t table = batch.page_offsets[tile.sequence];
    const int64_t chunks = ceil_div(tile.keys(), chunk_size(tile.tokens * group, wide_rows));
    const int64_t needed = chunks * tile.tokens;
    const bool hopper = wide_rows == kHopperRows && tile.wide(group);
    const int64_t filling = hopper ? kFillingHopperBlocks : kFillingBlocks, few_chunks = hopper ? 1 : 2;
    const bool too_long = chunks > few_chunks && tile.keys() * filling > work && rows + needed <= kMaxPartRows;
    const bool shared = split == AttentionSplit::kAlways ? chunks > 1 : split == AttentionSplit::kAuto && too_long;
    if (!shared) {
      plan.items.push_back(
          {tile.sequence, table, tile.first_token, tile.tokens, tile.position, 0, static_cast<int32_t>(chunks), -1});
    } else {
      plan.merges.push_back({tile.first_token, tile.tokens, static_cast<int32_t>(rows), static_cast<int32_t>(chunks)});
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        plan.items.push_back({tile.sequence, table, tile.first_token, tile.tokens, tile.position,
                              static_cast<int32_t>(chunk), 1, static_cast<int32_t>(rows + chunk * tile.tokens)});
      }
      rows += needed;
    }
  }
  plan.part_rows = static_cast<int32_t>(rows);

  const auto is_wide = [group](const AttentionItem& item) { return item.tokens * group > kNarrowRows; };
  plan.wide_items = static_cast<int32_t>(std::count_if(plan.items.begin(), plan.items.end(), is_wide));
  const auto more_work = [](const AttentionItem& a, const AttentionItem& b) { return a.chunks > b.chunks; };
  std::stable_sort(plan.items.begin(), plan.items.begin() + plan.wide_items, more_work);
  std::stable_sort(plan.items.begin() + plan.wide_items, plan.items.end(), more_work);
  return plan;
}

int64_t max_part_rows(int64_t tokens, int64_t sequences, int64_t context) {
  (void)sequences;
  const int64_t chunks = ceil_div(context, kAttentionChunk);
  if (chunks <= 2) return 0;
  // Compares by division, because the product may overflow.
  return tokens > kMaxPartRows / chunks ? kMaxPartRows : tokens * chunks;
}

int64_t max_attention_items(int64_t tokens, int64_t sequences, int64_t context) {
  return tokens + max_part_rows(tokens, sequences, context);
}

}  // namespace refit::cuda
