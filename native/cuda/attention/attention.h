// Grouped-query attention over the paged KV cache: online softmax, fp32 accumulation, causal by absolute position. Keys
// are cut into chunks at absolute positions (kAttentionChunk), and the chunks are combined in order. So a token's
// result depends neither on the batch nor on how its prompt was cut into steps. It is the same bit for bit whether one
// block computes all chunks or several blocks divide them.
//
// Sequences that sample from one prompt share its pages. A step reads the keys in them once (AttentionPrefix), and the
// sequences' items continue from the sums over them, with the same bits as if each had computed all keys.
//
// One exception: WideKernel::kHopper has larger tiles and chunks. Where it computes the wide items, a token's bits
// depend on whether its item is wide, which is whether its step has more than kNarrowRows rows of its sequence and does
// not sample after each of its tokens (samples_all).
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
// The chunks of WideKernel::kHopper are longer: its sums wait in shared memory, whose bandwidth its products need.
constexpr int kHopperChunk = 512;

// The kernel of the wide items.
enum class WideKernel : uint8_t {
  kMma,          // any GPU
  kHopper,       // compute capability 9.0, head_dim 64 or 128
  kHopperExact,  // the same, with the bits of all other kernels; long sequences take up to a quarter longer
};
constexpr int rows_of(WideKernel wide) { return wide == WideKernel::kMma ? kWideRows : kHopperRows; }
// Most new tokens of a sequence that samples after each of them and is cut into narrow items, and of a short step.
constexpr int kSampledTokens = 32, kShortStepTokens = 512;
// Keys that sequences share are counted in units of one tile (or two where tiles have 32 keys).
constexpr int kPrefixKeys = 64;

// One piece of work, the same for every layer and rank: some adjacent tokens of one sequence against some chunks of its
// keys. The kernel adds KV heads as a dimension of its own.
struct AttentionItem {
  int32_t sequence;
  int32_t table;                // where its page table begins in the step's pages
  int32_t first_token, tokens;  // into the step's tokens; no tokens: padding
  int32_t position;             // absolute, of first_token
  int32_t old;                  // keys before this position are older than the step
  int32_t chunk, chunks;        // keys [chunk * size, (chunk + chunks) * size), where size is chunk_size(...)
  int32_t part;  // row of its partial result in the partial buffers; -1: it has all its chunks and writes to out
  // For a member of a prefix (AttentionPrefix), else 0:
  int32_t skip = 0;               // keys at the beginning of its first chunk that the prefix contains
  int32_t state = 0, states = 0;  // rows of partial results of the chunks before; row state + states: of `skip` keys
};
// Decoding tokens whose sequences begin with the same pages, against some chunks of the keys in these. Such keys are
// read once for all of them; the members' own items go on from there. Results are rows of the partial buffers.
struct AttentionPrefix {
  int32_t table;                  // of one of the sequences
  int32_t first_member, members;  // into AttentionPlan::members; no members: padding
  int32_t keys;                   // of all chunks: a multiple of kPrefixKeys, all of them before each member's token
  int32_t chunk, chunks;          // as in AttentionItem
  // Its result, counted from each member's first row: its complete chunks, combined. Keys of an incomplete last chunk
  // are a row of their own, behind that one.
  int32_t row;
};
struct AttentionMember {
  int32_t token;
  int32_t part;  // its first row of partial results
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
  WideKernel wide = WideKernel::kMma;
  int32_t part_rows = 0;  // rows of partial results needed: [part_rows, heads, head_dim + 2] floats
  std::vector<AttentionPrefix> prefixes;
  std::vector<AttentionMember> members;
  bool is_short = false;  // all sequences decode or sample after each token (samples_all), with few tokens in all
};

// Keys of a chunk of an item of `rows` rows.
constexpr int chunk_size(int64_t rows, WideKernel wide) {
  return rows > kNarrowRows && wide == WideKernel::kHopper ? kHopperChunk : kAttentionChunk;
}

// Whether blocks divide a token's chunks: kAuto does so if there are too few blocks to occupy a GPU. The other values
// are for tests; kAlways may need more rows than max_part_rows returns.
enum class AttentionSplit : uint8_t { kAuto, kAlways, kNever };

// How keys are computed that several decoding sequences share, which the page tables tell. A token's bits are the same
// either way.
struct AttentionSharing {
  int page_size = 0;    // of the page tables; 0: each sequence reads its keys for itself
  bool always = false;  // also where sharing costs more than it saves: for tests
};

// For each sequence whether it decodes, or samples after each of its new tokens and has few: the last one and guesses.
// Its items are narrow then, unless one token's rows are too many, so its bits are those of decode steps.
std::vector<bool> samples_all(const StepBatch& batch);

// The fastest kernel for the current GPU and this head_dim; `exact`: of those with the bits of the narrow kernel.
WideKernel wide_kernel_here(int head_dim, bool exact);

// group: query heads per KV head, at most kWideRows; throws std::invalid_argument otherwise. kv_heads: of one rank; it
// only guides the division of work.
AttentionPlan plan_attention(const StepBatch& batch, int group, int kv_heads = 8,
                             AttentionSplit split = AttentionSplit::kAuto, WideKernel wide = WideKernel::kMma,
                             const AttentionSharing& sharing = {});
// Maximum part_rows of any batch of `tokens` new tokens in `sequences` sequences of at most `context` tokens.
int64_t max_part_rows(int64_t tokens, int64_t sequences, int64_t context);
// Maximum number of items of such a batch; there are at most `tokens` merges and as many members, and at most
// max_part_rows prefixes, because each writes a row.
int64_t max_attention_items(int64_t tokens, int64_t sequences, int64_t context);

struct AttentionInput {
  const AttentionItem* items;  // on the GPU, like all pointers below
  int item_count;
  const AttentionMerge* merges;
  int merge_count;
  const int32_t* pages;
  float* parts;                        // scratch, aligned to 8 bytes
  int wide_items = -1;                 // AttentionPlan::wide_items; -1: unknown, which costs an empty launch
  WideKernel wide = WideKernel::kMma;  // AttentionPlan::wide
  const AttentionPrefix* prefixes = nullptr;
  int prefix_count = 0;
  const AttentionMember* members = nullptr;
};

// qkv [T, ldq] after rope_and_cache: q is its first heads * head_dim columns. out [T, heads * head_dim]. head_dim must
// be a multiple of 8 up to 256; throws std::invalid_argument otherwise. With a Hopper kernel also ldq must be a
// multiple of head_dim, and qkv and out be aligned to 16 bytes. The cache contains all keys up to each token's own;
// slots of a page beyond them may contain anything. The kernels before may write qkv and the keys of the step's tokens;
// all else is older than the step, and may be read while they run (early_launch.cuh).
void attention(const Element* qkv, int64_t ldq, const AttentionInput& input, const KvLayer& kv, int heads, Element* out,
               cudaStream_t stream);

}  // namespace refit::cuda
