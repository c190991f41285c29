// Grouped-query attention over the paged KV cache: online softmax, fp32 accumulation, causal by absolute position. Keys
// are cut at absolute positions (kAttentionChunk) and the chunks combined in order, so a token's result depends neither
// on the batch nor on how its prompt was cut into steps. Whether one block walks all chunks or several share them
// changes no bit.
#pragma once
#include <vector>

#include "core/step.h"
#include "cuda/device/types.h"

namespace refit::cuda {

constexpr int kAttentionChunk = 256;
// Rows (tokens times query heads per KV head) of one item: up to 16 are computed by the narrow kernel (decode), up to
// 64 by the wide one.
constexpr int kNarrowRows = 16;
constexpr int kWideRows = 64;

// One piece of work, the same for every layer and rank: some neighbouring tokens of one sequence against some chunks of
// its keys. KV heads are the kernel's own dimension.
struct AttentionItem {
  int32_t sequence;
  int32_t table;                // where its page table begins in the step's pages
  int32_t first_token, tokens;  // into the step's tokens
  int32_t position;             // absolute, of first_token
  int32_t chunk, chunks;        // keys [chunk * kAttentionChunk, (chunk + chunks) * kAttentionChunk)
  int32_t part;  // where its partial result lies (row of the partial buffers); -1: all its chunks, written to out
};
// What combines the parts of some tokens.
struct AttentionMerge {
  int32_t first_token, tokens;
  int32_t part, parts;  // first row of partials of the first chunk, and how many chunks; a chunk has `tokens` rows
};

// Made on the host, once per step; all arrays are copied into the step's block on the GPU.
struct AttentionPlan {
  std::vector<AttentionItem> items;  // first those of more than kNarrowRows rows; most work first within both
  std::vector<AttentionMerge> merges;
  int32_t wide_items = 0;  // items of more than kNarrowRows rows
  int32_t part_rows = 0;   // rows of partial results needed: [part_rows, heads, head_dim + 2] floats
};

// Whether a token's chunks are shared among blocks: kAuto where there are too few blocks to fill a GPU otherwise. The
// others are for tests; kAlways may need more rows than max_part_rows says.
enum class AttentionSplit : uint8_t { kAuto, kAlways, kNever };

// group: query heads per KV head, at most kWideRows; throws std::invalid_argument beyond. kv_heads: of one rank; it
// only guides how work is split.
AttentionPlan plan_attention(const StepBatch& batch, int group, int kv_heads = 8,
                             AttentionSplit split = AttentionSplit::kAuto);
// Most part_rows that any batch of `tokens` new tokens in `sequences` sequences of at most `context` tokens can need.
int64_t max_part_rows(int64_t tokens, int64_t sequences, int64_t context);
// Most items of such a batch; merges are at most `tokens`.
int64_t max_attention_items(int64_t tokens, int64_t sequences, int64_t context);

struct AttentionInput {
  const AttentionItem* items;  // on the GPU, as are all below
  int item_count;
  const AttentionMerge* merges;
  int merge_count;
  const int32_t* page_offsets;  // [S + 1]; not read: items say where tables begin
  const int32_t* pages;
  float* parts;         // scratch, aligned to 8 bytes
  int wide_items = -1;  // AttentionPlan::wide_items; -1: not known, which costs an empty launch
};

// qkv [T, ldq] after rope_and_cache: q is its first heads * head_dim columns. out [T, heads * head_dim]. head_dim is a
// multiple of 8 up to 256; throws std::invalid_argument otherwise. All keys up to each token's own are in the cache;
// slots of a page beyond them may hold anything.
void attention(const bf16* qkv, int64_t ldq, const AttentionInput& input, const KvLayer& kv, int heads, bf16* out,
               cudaStream_t stream);

}  // namespace refit::cuda
