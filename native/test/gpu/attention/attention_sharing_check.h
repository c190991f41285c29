// Checks that a plan of attention in which sequences share keys computes the same sums, in the same order, as one
// without. Needs no GPU.
#pragma once
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "core/step.h"
#include "cuda/attention/attention.h"
#include "cuda/attention/attention_prefixes.h"
#include "test/check.h"
#include "test/gpu/attention/attention_plan_check.h"

namespace refit::test {

// A step whose sequences have page tables.
struct SharingCase : PlanCase {
  int page_size;
  std::vector<std::vector<int32_t>> tables;
  std::vector<int32_t> pages;
  int32_t next_page = 0;

  explicit SharingCase(int page_size) : page_size(page_size) {}
  StepBatch batch() const {
    StepBatch b = PlanCase::batch();
    b.pages = pages;
    return b;
  }
  // Begins with `shared` pages of `parent`; returns the index of the sequence.
  int add(int start, int count, int parent = 0, int shared = 0) {
    std::vector<int32_t> table;
    for (int p = 0; p * page_size < start + count; ++p) {
      table.push_back(p < shared ? tables[parent][p] : next_page++);
    }
    tokens.resize(tokens.size() + count);
    seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
    start_pos.push_back(start);
    pages.insert(pages.end(), table.begin(), table.end());
    page_offsets.push_back(static_cast<int32_t>(pages.size()));
    tables.push_back(std::move(table));
    return static_cast<int>(tables.size()) - 1;
  }
};

// The sums of a token over some keys: a chunk or its beginning, or chunks that were combined in ascending order from
// the first on.
struct Sums {
  int token = -1;
  int64_t from = 0, until = 0;
};

inline void add_chunk(Sums& sums, const Sums& next, int size = cuda::kAttentionChunk) {
  CHECKF(next.until - next.from <= size && next.from % size == 0, "keys %lld to %lld are no chunk",
         static_cast<long long>(next.from), static_cast<long long>(next.until));
  if (sums.token < 0) sums = {next.token, 0, 0};
  CHECKF(sums.token == next.token && sums.from == 0 && sums.until == next.from,
         "token %d, keys %lld to %lld: followed by token %d, keys %lld to %lld", sums.token,
         static_cast<long long>(sums.from), static_cast<long long>(sums.until), next.token,
         static_cast<long long>(next.from), static_cast<long long>(next.until));
  sums.until = next.until;
}

// Does what the kernels do, with intervals of keys in the place of sums.
class SharingRun {
 public:
  SharingRun(const SharingCase& c, const cuda::AttentionPlan& plan, int group)
      : c_(c), batch_(c.batch()), plan_(plan), group_(group), rows_(plan.part_rows), out_(c.tokens.size()) {}

  void run() {
    for (const cuda::AttentionPrefix& prefix : plan_.prefixes) compute(prefix);
    for (const cuda::AttentionItem& item : plan_.items) compute(item);
    for (const cuda::AttentionMerge& merge : plan_.merges) {
      for (int j = 0; j < merge.tokens; ++j) {
        Sums sums;
        for (int i = 0; i < merge.parts; ++i) {
          Sums next = rows_[merge.part + i * merge.tokens + j];
          // A prefix's chunks may have been combined before.
          if (i == 0 && next.from == 0) {
            sums = next;
          } else {
            add_chunk(sums, next, cuda::chunk_size(merge.tokens * group_, plan_.wide));
          }
        }
        finish(merge.first_token + j, sums);
      }
    }
    for (int s = 0; s < batch_.sequences(); ++s) {
      for (int t = batch_.seq_offsets[s]; t < batch_.seq_offsets[s + 1]; ++t) {
        const int64_t keys = batch_.start_pos[s] + (t - batch_.seq_offsets[s]) + 1;
        // Later tokens of the same item may see more chunks; those are masked.
        CHECKF(out_[t].token == t && out_[t].from == 0 && out_[t].until >= keys, "token %d: keys %lld to %lld of %lld",
               t, static_cast<long long>(out_[t].from), static_cast<long long>(out_[t].until),
               static_cast<long long>(keys));
      }
    }
  }

 private:
  void put(int64_t row, const Sums& sums) {
    if (!CHECKF(row >= 0 && row < static_cast<int64_t>(rows_.size()), "row %lld", static_cast<long long>(row))) return;
    CHECKF(rows_[row].token < 0, "row %lld is written again", static_cast<long long>(row));
    rows_[row] = sums;
  }
  void finish(int token, const Sums& sums) {
    CHECKF(out_[token].token < 0, "token %d is computed again", token);
    CHECK(sums.token == token);
    out_[token] = sums;
  }

  void compute(const cuda::AttentionPrefix& prefix) {
    constexpr int64_t kChunk = cuda::kAttentionChunk;
    CHECK(prefix.members > 0 && prefix.members * group_ <= cuda::kWideRows && prefix.keys > 0);
    CHECK(prefix.keys % cuda::kPrefixKeys == 0 && prefix.chunks > 0 && prefix.chunk * kChunk < prefix.keys);
    CHECK(prefix.chunks == 1 || prefix.chunk == 0);
    const int64_t used = (prefix.keys + c_.page_size - 1) / c_.page_size;
    for (int i = 0; i < prefix.members; ++i) {
      const cuda::AttentionMember& member = plan_.members[prefix.first_member + i];
      const int s = static_cast<int>(std::upper_bound(c_.seq_offsets.begin(), c_.seq_offsets.end(), member.token) -
                                     c_.seq_offsets.begin()) -
                    1;
      CHECK(c_.seq_offsets[s + 1] - c_.seq_offsets[s] == 1 && prefix.keys <= c_.start_pos[s]);
      CHECK(std::memcmp(c_.pages.data() + prefix.table, c_.tables[s].data(), used * sizeof(int32_t)) == 0);
      const int64_t first = prefix.chunk * kChunk, end = std::min<int64_t>(prefix.keys, first + prefix.chunks * kChunk);
      const int64_t complete = end / kChunk * kChunk;
      int64_t row = member.part + prefix.row;
      if (complete > first) put(row++, {member.token, first, complete});
      if (end > complete) put(row, {member.token, std::max(first, complete), end});
    }
  }

  void compute(const cuda::AttentionItem& item) {
    const int64_t size = cuda::chunk_size(item.tokens * group_, plan_.wide);
    const int64_t end = std::min<int64_t>(item.position + item.tokens, (item.chunk + item.chunks) * size);
    CHECK((item.states == 0 && item.skip == 0) || item.tokens == 1);
    for (int j = 0; j < item.tokens; ++j) {
      const int token = item.first_token + j;
      const int64_t first = item.chunk * size;
      Sums begun{token, first, first};
      if (item.skip > 0) {
        Sums& row = rows_[item.state + item.states];
        CHECK(row.token == token && row.from == first && row.until == first + item.skip);
        row = {};  // the item may write its own sums here
      }
      CHECK(first + item.skip < end);
      begun.until = end;
      if (item.part >= 0) {
        put(item.part + j, begun);
        continue;
      }
      Sums sums;
      for (int i = 0; i < item.states; ++i) {
        const Sums& row = rows_[item.state + i];
        if (i == 0) {
          CHECK(row.from == 0);
          sums = row;
        } else {
          add_chunk(sums, row);
        }
      }
      CHECK(sums.until == first && (first == 0 || sums.token == token));
      finish(token, {token, 0, end});
    }
  }

  const SharingCase& c_;
  const StepBatch batch_;
  const cuda::AttentionPlan& plan_;
  const int group_;
  std::vector<Sums> rows_, out_;
};

inline size_t check_sharing_plan(const SharingCase& c, int group, int kv_heads, cuda::AttentionSplit split, bool always,
                                 cuda::WideKernel wide) {
  const cuda::AttentionPlan plan = cuda::plan_attention(c.batch(), group, kv_heads, split, wide, {c.page_size, always});
  SharingRun(c, plan, group).run();
  if (split != cuda::AttentionSplit::kAlways) {
    const auto tokens = static_cast<int64_t>(c.tokens.size());
    int64_t context = 0;
    for (int s = 0; s + 1 < static_cast<int>(c.seq_offsets.size()); ++s) {
      context = std::max<int64_t>(context, c.start_pos[s] + c.seq_offsets[s + 1] - c.seq_offsets[s]);
    }
    CHECK(plan.part_rows <= cuda::max_part_rows(tokens, tokens, context));
    CHECK(static_cast<int64_t>(plan.items.size()) <= cuda::max_attention_items(tokens, tokens, context));
    CHECK(static_cast<int64_t>(plan.prefixes.size()) <= cuda::max_part_rows(tokens, tokens, context));
  }
  CHECK(static_cast<int64_t>(plan.members.size()) <= static_cast<int64_t>(c.tokens.size()));
  return plan.prefixes.size();
}

// The choice of prefixes.
inline void check_choices() {
  const auto find = [](const SharingCase& c, int64_t cost = 0) {
    return cuda::find_prefixes(c.batch(), c.page_size, cost);
  };
  // 31 pages are 496 keys, which are 7 tiles.
  SharingCase samples(16);
  std::vector<int> first;
  for (int i = 0; i < 4; ++i) first.push_back(samples.add(520 + i, 1));
  for (int n = 1; n < 8; ++n) {
    for (int i = 0; i < 4; ++i) samples.add(600 + n, 1, first[i], 31);
  }
  auto found = find(samples, 32);
  CHECK(found.size() == 4);
  for (const cuda::SharedPrefix& p : found) CHECK(p.keys == 448 && p.sequences.size() == 8);
  // Within a system prompt of 2,048 tokens: many samples of each prompt share that, few share the system prompt.
  for (const int samples_each : {2, 8}) {
    SharingCase nested(16);
    nested.add(2100, 1);
    for (int i = 0; i < 16; ++i) {
      const int prompt = nested.add(2600 + i, 1, 0, 128);
      for (int n = 1; n < samples_each; ++n) nested.add(2650, 1, prompt, 160);
    }
    found = find(nested, 32);
    CHECK(found.size() == (samples_each == 2 ? 1 : 16));
    for (const cuda::SharedPrefix& p : found) CHECK(p.keys == (samples_each == 2 ? 2048 : 2560));
  }
  // Less than a tile; only one sequence that decodes; a token in the last page that is equal.
  SharingCase none(16);
  none.add(70, 1);
  none.add(70, 1, 0, 3);
  none.add(80, 4, 0, 4);
  CHECK(find(none).empty());
  none.add(64, 1, 0, 4);
  CHECK(find(none).size() == 1 && find(none)[0].keys == 64 && find(none)[0].sequences == std::vector<int32_t>({0, 3}));
  CHECK(find(none, 32).empty());
  // Each begins with all pages of the one before; each leaves the first one 4 pages later than the one before. Half of
  // the sequences share the keys that the shortest of them has, the others are pairs.
  SharingCase chain(16), leave(16);
  for (int i = 0; i < 40; ++i) {
    chain.add((i + 1) * 64, 1, std::max(0, i - 1), i * 4);
    leave.add(40 * 64, 1, 0, i * 4);
  }
  for (const SharingCase* c : {&chain, &leave}) {
    found = find(*c, 32);
    if (!CHECK(found.size() == 10)) continue;
    CHECK(found[0].keys == 1280 && found[0].sequences.size() == 21);
    for (int64_t i = 1; i < 10; ++i) CHECK(found[i].keys == 1280 - 128 * i && found[i].sequences.size() == 2);
  }
}

inline void check_sharing(uint64_t seed) {
  using cuda::AttentionSplit;
  check_choices();
  std::mt19937_64 rng(seed);
  const auto below = [&rng](int n) { return static_cast<int>(rng() % n); };
  size_t prefixes = 0;
  for (int round = 0; round < 300; ++round) {
    const int pages[] = {1, 7, 16, 64, 1024};
    SharingCase c(pages[below(5)]);
    const int sequences = 1 + below(round % 8 == 0 ? 200 : 12), longest = below(3) == 0 ? 9000 : 900;
    for (int s = 0; s < sequences; ++s) {
      const int parent = s == 0 || below(4) == 0 ? 0 : below(s);
      const int full = s == 0 ? 0 : c.start_pos[parent] / c.page_size;
      const int shared = full == 0 || below(5) == 0 ? 0 : below(3) == 0 ? full : below(full + 1);
      const int start = shared * c.page_size + (below(4) == 0 ? 0 : below(longest));
      c.add(start, below(6) == 0 ? 1 + below(200) : 1, parent, shared);
    }
    const int group = below(3) == 0 ? 1 + below(64) : 1 << below(5), kv_heads = 1 << below(4);
    for (const AttentionSplit split : {AttentionSplit::kAuto, AttentionSplit::kAlways, AttentionSplit::kNever}) {
      for (const auto wide : kWideKernels) {
        prefixes += check_sharing_plan(c, group, kv_heads, split, true, wide);
        check_sharing_plan(c, group, kv_heads, split, false, wide);
      }
    }
  }
  CHECK(prefixes > 1000);
  // More members than rows of partial results: some read all their keys.
  SharingCase full(16);
  full.add(4200, 1);
  for (int i = 1; i < 9000; ++i) full.add(4200, 1, 0, 261);
  CHECK(check_sharing_plan(full, 4, 8, AttentionSplit::kAuto, false, cuda::WideKernel::kMma) == 0);
}

}  // namespace refit::test
