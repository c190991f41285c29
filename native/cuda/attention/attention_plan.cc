#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_prefixes.h"

namespace refit::cuda {
namespace {

// Number of blocks that occupies a large GPU: two on each of 132 multiprocessors, or one of the Hopper kernel.
constexpr int64_t kFillingBlocks = 264, kFillingHopperBlocks = 132;
// Limits the memory of partial results. 8192 rows are 64 decoding sequences of 32k tokens; items that do not fit are
// not split, and keys whose sums do not fit are not shared.
constexpr int64_t kMaxPartRows = 8192;
// A row of a prefix's sums is written and read, which takes about as long as reading so many keys. Another launch takes
// about as long as reading so many keys of one KV head.
constexpr int64_t kStateCost = 32, kPrefixLaunchCost = 65536;
// Sums of more chunks of a prefix are combined by a merge, which has more loads in flight than the items.
constexpr int32_t kFewStates = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sorts by falling keys; equal ones stay in their order. Elements are large, so each moves once.
template <class T, class Key>
void sort_falling(std::vector<T>& list, const Key& key) {
  std::vector<std::pair<int64_t, size_t>> order;
  order.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) order.emplace_back(-int64_t{key(list[i])}, i);
  if (std::is_sorted(order.begin(), order.end())) return;
  std::sort(order.begin(), order.end());
  std::vector<T> sorted;
  sorted.reserve(list.size());
  for (const auto& [falling, from] : order) sorted.push_back(list[from]);
  list = std::move(sorted);
}
constexpr int64_t kWideFirst = int64_t{1} << 40;  // added to the keys of wide tiles and items

// A decoding sequence that is a member of a prefix.
struct Membership {
  int32_t member = -1;  // in AttentionPlan::members; -1: of none
  int32_t keys = 0;     // of the prefix
  int32_t states = 0;   // rows of partial results of the prefix's complete chunks

  bool begun() const { return keys % kAttentionChunk != 0; }  // then one more row
  int32_t rows() const { return states + (begun() ? 1 : 0); }
};

// Adjacent tokens of one sequence.
struct Tile {
  int32_t sequence, first_token, tokens, position;
  Membership prefix;

  int64_t keys() const { return static_cast<int64_t>(position) + tokens - prefix.keys; }
  bool wide(int group) const { return tokens * group > kNarrowRows; }
};

// A sequence of more than one tile is cut evenly, so that no tile of a prefill is narrow: it is then one launch.
void cut_sequence(const StepBatch& batch, int sequence, int most_tokens, std::vector<Tile>& tiles) {
  const int32_t first = batch.seq_offsets[sequence], count = batch.seq_offsets[sequence + 1] - first;
  const int64_t pieces = ceil_div(count, most_tokens);
  for (int64_t i = 0; i < pieces; ++i) {
    const auto begin = static_cast<int32_t>(i * count / pieces), end = static_cast<int32_t>((i + 1) * count / pieces);
    tiles.push_back({sequence, first + begin, end - begin, batch.start_pos[sequence] + begin, {}});
  }
}

// Divides a prefix among items of up to kWideRows rows: one of the first `head` chunks, and one of each other chunk.
void cut_prefix(const SharedPrefix& prefix, int32_t table, int32_t first_member, int group, int32_t head,
                std::vector<AttentionPrefix>& items) {
  const auto members = static_cast<int64_t>(prefix.sequences.size());
  const auto chunks = static_cast<int32_t>(ceil_div(prefix.keys, kAttentionChunk));
  const int64_t pieces = ceil_div(members, kWideRows / group);
  for (int32_t chunk = 0, row = 0; chunk < chunks; chunk += row == 0 ? head : 1, ++row) {
    for (int64_t i = 0; i < pieces; ++i) {
      const auto begin = static_cast<int32_t>(i * members / pieces);
      const auto end = static_cast<int32_t>((i + 1) * members / pieces);
      items.push_back({table, first_member + begin, end - begin, static_cast<int32_t>(prefix.keys), chunk,
                       row == 0 ? head : 1, row});
    }
  }
}

// Plans the prefixes of a step. Returns the memberships of its sequences; their rows of partial results are at most
// kMaxPartRows, unless they are always split.
std::vector<Membership> plan_prefixes(const StepBatch& batch, int group, int kv_heads, AttentionSplit split,
                                      const AttentionSharing& sharing, AttentionPlan& plan) {
  std::vector<Membership> memberships(batch.sequences());
  if (sharing.page_size == 0 || group > kNarrowRows) return memberships;
  const std::vector<SharedPrefix> prefixes = find_prefixes(batch, sharing.page_size, sharing.always ? 0 : kStateCost);
  int64_t saved = 0, work = 0;
  for (const SharedPrefix& prefix : prefixes) {
    const auto members = static_cast<int64_t>(prefix.sequences.size());
    saved += (members - 1) * prefix.keys * kv_heads;
    work += ceil_div(members, kWideRows / group) * prefix.keys * kv_heads;
  }
  if (!sharing.always && saved < kPrefixLaunchCost) return memberships;

  int64_t rows = 0;
  for (const SharedPrefix& prefix : prefixes) {
    const auto members = static_cast<int64_t>(prefix.sequences.size());
    const int64_t complete = prefix.keys / kAttentionChunk, begun = prefix.keys % kAttentionChunk != 0 ? 1 : 0;
    // Chunks that one block computes before the others are divided: its share of all work.
    int64_t head = complete + begun;
    const bool too_long = prefix.keys * kFillingBlocks > work + work / 2;
    if (split == AttentionSplit::kAlways) head = 1;
    if (split == AttentionSplit::kAuto && too_long) {
      head = std::clamp<int64_t>(work / kFillingBlocks / kAttentionChunk, 1, head);
    }
    // These chunks are one row, each other one is a row.
    const auto states = [&] { return complete <= head ? std::min<int64_t>(complete, 1) : complete - head + 1; };
    const auto fits = [&] { return rows + members * (states() + begun) <= kMaxPartRows; };
    if (split != AttentionSplit::kAlways && !fits()) {
      head = complete + begun;
      if (!fits()) continue;
    }
    rows += members * (states() + begun);
    const auto first_member = static_cast<int32_t>(plan.members.size());
    for (const int32_t s : prefix.sequences) {
      memberships[s] = {static_cast<int32_t>(plan.members.size()), static_cast<int32_t>(prefix.keys),
                        static_cast<int32_t>(states())};
      plan.members.push_back({batch.seq_offsets[s], -1});
    }
    cut_prefix(prefix, batch.page_offsets[prefix.sequences.front()], first_member, group, static_cast<int32_t>(head),
               plan.prefixes);
  }
  sort_falling(plan.prefixes, [](const AttentionPrefix& p) {
    return std::min(p.keys, (p.chunk + p.chunks) * kAttentionChunk) - p.chunk * kAttentionChunk;
  });
  return memberships;
}

}  // namespace

std::vector<bool> samples_all(const StepBatch& batch) {
  std::vector<bool> sampled(batch.tokens.size()), all(static_cast<size_t>(batch.sequences()));
  for (int row = 0; row < batch.rows(); ++row) sampled[batch.row_ints[static_cast<size_t>(row) * kRowInts]] = true;
  for (int s = 0; s < batch.sequences(); ++s) {
    const auto first = sampled.begin() + batch.seq_offsets[s], end = sampled.begin() + batch.seq_offsets[s + 1];
    all[s] = end - first == 1 || (end - first <= kSampledTokens && std::find(first, end, false) == end);
  }
  return all;
}

AttentionPlan plan_attention(const StepBatch& batch, int group, int kv_heads, AttentionSplit split, WideKernel wide,
                             const AttentionSharing& sharing) {
  if (group < 1 || group > kWideRows) {
    throw std::invalid_argument("attention: " + std::to_string(group) + " query heads per KV head, expected 1 to " +
                                std::to_string(kWideRows));
  }
  AttentionPlan plan;
  plan.wide = wide;
  const std::vector<Membership> memberships = plan_prefixes(batch, group, kv_heads, split, sharing, plan);
  const std::vector<bool> sampled = samples_all(batch);
  const auto tokens = static_cast<int>(batch.tokens.size());
  plan.is_short = std::find(sampled.begin(), sampled.end(), false) == sampled.end() &&
                  (tokens == batch.sequences() || tokens <= kShortStepTokens);
  std::vector<Tile> tiles;
  // Rows of partial results that are left, if no other tile is divided.
  int64_t spare = kMaxPartRows;
  for (int s = 0; s < batch.sequences(); ++s) {
    cut_sequence(batch, s, (sampled[s] && group <= kNarrowRows ? kNarrowRows : rows_of(wide)) / group, tiles);
    if (memberships[s].member < 0) continue;
    tiles.back().prefix = memberships[s];
    spare -= memberships[s].rows();
  }
  sort_falling(tiles, [group](const Tile& tile) { return tile.keys() + (tile.wide(group) ? kWideFirst : 0); });

  // Work is counted in keys: a narrow tile waits for memory about as long as a wide one computes.
  int64_t work = 0;
  for (const Tile& tile : tiles) work += tile.keys() * kv_heads;
  int32_t rows = 0;
  for (const Tile& tile : tiles) {
    const Membership& prefix = tile.prefix;
    const int32_t size = chunk_size(tile.tokens * group, wide), first = prefix.keys / size;
    const auto chunks = static_cast<int32_t>(ceil_div(int64_t{tile.position} + tile.tokens, size)) - first;
    const int64_t needed = int64_t{chunks} * tile.tokens - (prefix.begun() ? 1 : 0);
    const bool hopper = wide != WideKernel::kMma && tile.wide(group);
    const int64_t filling = hopper ? kFillingHopperBlocks : kFillingBlocks;
    const int64_t few_chunks = hopper ? kHopperChunk / size : prefix.states > kFewStates ? 0 : 2;
    const int64_t cost = tile.keys() + prefix.states * kStateCost;
    const bool too_long = chunks > few_chunks && cost * filling > work && needed <= spare;
    const bool shared = split == AttentionSplit::kAlways ? chunks > 1 : split == AttentionSplit::kAuto && too_long;
    AttentionItem item{.sequence = tile.sequence,
                       .table = batch.page_offsets[tile.sequence],
                       .first_token = tile.first_token,
                       .tokens = tile.tokens,
                       .position = tile.position,
                       .old = batch.start_pos[tile.sequence],
                       .chunk = first,
                       .chunks = chunks,
                       .part = -1,
                       .skip = prefix.keys % size};
    if (prefix.member >= 0) plan.members[prefix.member].part = rows;
    if (!shared) {
      item.state = rows;
      item.states = prefix.states;
      plan.items.push_back(item);
      rows += prefix.rows();
    } else {
      plan.merges.push_back({tile.first_token, tile.tokens, rows, prefix.states + chunks});
      rows += prefix.states;
      item.chunks = 1;
      for (int32_t chunk = first; chunk < first + chunks; ++chunk, rows += tile.tokens) {
        item.chunk = chunk;
        item.part = item.state = rows;
        plan.items.push_back(item);
        item.skip = 0;
      }
      spare -= needed;
    }
  }
  plan.part_rows = rows;

  const auto is_wide = [group](const AttentionItem& item) { return item.tokens * group > kNarrowRows; };
  plan.wide_items = static_cast<int32_t>(std::count_if(plan.items.begin(), plan.items.end(), is_wide));
  sort_falling(plan.items, [&](const AttentionItem& item) { return item.chunks + (is_wide(item) ? kWideFirst : 0); });
  return plan;
}

int64_t max_part_rows(int64_t tokens, int64_t sequences, int64_t context) {
  (void)sequences;
  if (context <= kPrefixKeys) return 0;
  const int64_t chunks = ceil_div(context, kAttentionChunk);
  // Compares by division, because the product may overflow.
  return tokens > kMaxPartRows / chunks ? kMaxPartRows : tokens * chunks;
}

int64_t max_attention_items(int64_t tokens, int64_t sequences, int64_t context) {
  return tokens + max_part_rows(tokens, sequences, context);
}

}  // namespace refit::cuda
