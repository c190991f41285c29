// Grouped-query attention over the paged KV cache: online softmax, fp32 accumulation, causal by absolute position. Keys
// are cut into chunks at absolute positions (kAttentionChunk), and the chunks are combined in order. So a token's
// result depends neither on the batch nor on how its prompt was cut into steps. It is the same bit for bit whether one
// block computes all chunks or several blocks divide them.
//
// One exception: the Hopper kernel adds products in the order of its hardware. Where it computes the wide items, a
// token's bits depend on whether its item is wide, which is whether its step has more than kNarrowRows rows of its
// sequence.
#pragma once
#include <vector>

#include "core/step.h"
#include "cuda/device/types.h"

namespace refit::cuda {

constexpr int kAttentionChunk = 256;
// Rows (tokens times query heads per KV head) of one item: the narrow kernel computes up to 16 (decode), the wide one
// up to 64, and its variant for Hopper up to 128.
constexpr int kNarrowRows = 16;
constexpr int kWideRows = 64;
constexpr int kHopperRows = 128;
// The chunks of the Hopper kernel are longer: its sums wait in shared memory, whose bandwidth its products need.
constexpr int kHopperChunk = 512;

// One piece of work, the same for every layer and rank: some adjacent tokens of one sequence against some chunks of its
// keys. The kernel adds KV heads as a dimension of its own.
struct AttentionItem {
  int32_t sequence;
  int32_t table;                // where its page table begins in the step's pages
  int32_t first_token, tokens;  // into the step's tokens; no tokens: padding
  int32_t position;             // absolute, of first_token
  int32_t chunk, chunks;        // keys [chunk * size, (chunk + chunks) * size), where size is chunk_size(...)
  int32_t part;  // row of its partial result in the partial buffers; -1: it has all its chunks and writes to out
};
// Combines the parts of some tokens.
struct AttentionMerge {
  int32_t first_token, tokens;
  int32_t part, parts;  // first row of partials of the first chunk, and number of chunks; a chunk has `tokens` rows
};

// Computed on the host, once per step; all arrays are copied into the step's block on the GPU.
struct AttentionPlan {
  std::vector<AttentionItem> items;  // items of more than kNarrowRows rows first; within both kinds the largest first
  std::vector<AttentionMerge> merges;
  int32_t wide_items = 0;  // items of more than kNarrowRows rows
  int32_t wide_rows = kWideRows;
  int32_t part_rows = 0;  // rows of partial results needed: [part_rows, heads, head_dim + 2] floats
};

// Keys of a chunk of an item of `rows` rows.
constexpr int chunk_size(int64_t rows, int wide_rows) {
  return rows > kNarrowRows && wide_rows == kHopperRows ? kHopperChunk : kAttentionChunk;
}

// Whether blocks divide a token's chunks: kAuto does so if there are too few blocks to occupy a GPU. The other values
// are for tests; kAlways may need more rows than max_part_rows returns.
enum class AttentionSplit : uint8_t { kAuto, kAlways, kNever };

// Most rows of a wide item for the current GPU: kHopperRows if it has the Hopper kernel for this head_dim, else
// kWideRows.
int wide_rows_here(int head_dim);

// group: query heads per KV head, at most kWideRows; throws std::invalid_argument otherwise. kv_heads: of one rank; it
// only guides the division of work. wide_rows: kWideRows, which any GPU computes, or kHopperRows.
AttentionPlan plan_attention(const StepBatch& batch, int group, int kv_heads = 8,
                             AttentionSplit split = AttentionSplit::kAuto, int wide_rows = kWideRows);
// Maximum part_rows of any batch of `tokens` new tokens in `sequences` sequences of at most `context` tokens.
int64_t max_part_rows(int64_t tokens, int64_t sequences, int64_t context);
// Maximum number of items of such a batch; there are at most `tokens` merges.
int64_t max_attention_items(int64_t tokens, int64_t sequences, int64_t context);

struct AttentionInput {
  const AttentionItem* items;  // on the GPU, like all pointers below
  int item_count;
  const AttentionMerge* merges;
  int merge_count;
  const int32_t* page_offsets;  // [S + 1]; not read: items contain where tables begin
  const int32_t* pages;
  float* parts;               // scratch, aligned to 8 bytes
  int wide_items = -1;        // AttentionPlan::wide_items; -1: unknown, which costs an empty launch
  int wide_rows = kWideRows;  // AttentionPlan::wide_rows
};

// qkv [T, ldq] after rope_and_cache: q is its first heads * head_dim columns. out [T, heads * head_dim]. head_dim must
// be a multiple of 8 up to 256; throws std::invalid_argument otherwise. With kHopperRows also ldq must be a multiple of
// head_dim, and qkv and out be aligned to 16 bytes. The cache contains all keys up to each token's
// own; slots of a page beyond them may contain anything.
void attention(const bf16* qkv, int64_t ldq, const AttentionInput& input, const KvLayer& kv, int heads, bf16* out,
               cudaStream_t stream);

}  // namespace refit::cuda
