#include "cuda/forward/forward_memory.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cuda/adapters/adapter_pass.h"
#include "cuda/attention/attention.h"
#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/step_graphs.h"
#include "cuda/forward/step_room.h"
#include "cuda/sampler/sampler.h"

namespace refit::cuda {
namespace {

constexpr int64_t kDefaultStepTokens = 8192;
// A long prompt over a large vocabulary is scored in blocks of rows: 160 MB of logits at most. Both are doubled where
// steps have more sequences, so that a step of up to 512 reads the head's weights once.
constexpr int64_t kLogitFloats = 40 << 20, kMostRows = 256;
constexpr size_t kGemmBytes = size_t{32} << 20;
constexpr size_t kAlignment = 256;
// Far below 2^64, so sums of a few sizes do not overflow.
constexpr unsigned __int128 kMostBytes = static_cast<unsigned __int128>(1) << 50;

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("bad configuration: " + what);
}

size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Divides a region among its users in order.
class Carver {
 public:
  explicit Carver(void* base, size_t used = 0) : base_(static_cast<uint8_t*>(base)), used_(used) {}
  template <class T>
  T* take(int64_t rows, int64_t cols = 1) {
    const unsigned __int128 bytes = static_cast<unsigned __int128>(rows) * cols * sizeof(T);
    require(bytes < kMostBytes, "a step's buffers overflow the address space; lower max_step_tokens");
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += padded(static_cast<size_t>(bytes));
    return at;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_;
};

size_t kv_bytes(const CoreConfig& config, const Layout& layout) {
  require(config.pages > 0 && config.page_size > 0, "pages and page_size must be positive");
  const int64_t slots = static_cast<int64_t>(config.pages) * config.page_size;
  require(slots <= std::numeric_limits<int32_t>::max(),
          std::to_string(slots) + " tokens of KV cache; at most 2^31 - 1 can be addressed");
  const unsigned __int128 bytes = static_cast<unsigned __int128>(slots) * layout.kv_heads * layout.recipe.head_dim *
                                  layout.recipe.layers * 2 * sizeof(Element);
  require(bytes < kMostBytes, "the KV cache overflows the address space");
  return static_cast<size_t>(bytes);
}

}  // namespace

ForwardShape::ForwardShape(const CoreConfig& config, const Layout& layout)
    : dense_inter(0), sparse_inter(0), few_sizes(config.deterministic) {
  const ModelRecipe& recipe = layout.recipe;
  require(config.dtype == kElementType,
          std::string("this CUDA library computes in ") + name_of(kElementType) + " only");
  require(layout.ranks <= kMaxRanks, std::to_string(layout.ranks) + " tensor-parallel ranks; at most " +
                                         std::to_string(kMaxRanks) + " GPUs are used");
  require(recipe.head_dim % 8 == 0 && recipe.head_dim <= 256,
          "head_dim " + std::to_string(recipe.head_dim) + " is not a multiple of 8 up to 256, which GPUs need");
  require(layout.group <= kWideRows, std::to_string(layout.group) + " query heads per KV head; at most " +
                                         std::to_string(kWideRows) + " are computed on GPUs");
  require(config.max_step_tokens >= 0 && config.max_step_sequences >= 0 && config.max_context >= 0,
          "max_step_tokens, max_step_sequences and max_context cannot be negative");
  require(config.pages > 0 && config.page_size > 0, "pages and page_size must be positive");
  tokens = config.max_step_tokens > 0 ? config.max_step_tokens : kDefaultStepTokens;
  context = static_cast<int64_t>(config.pages) * config.page_size;
  if (config.max_context > 0) context = std::min<int64_t>(context, config.max_context);
  logits_ld = (layout.ranks * layout.vocab_rows + 7) / 8 * 8;
  // A token has at most one row that scores it and one that samples after it.
  const int64_t times = config.max_step_sequences > kMostRows ? 2 : 1;
  rows = std::clamp<int64_t>(times * kLogitFloats / logits_ld, 1, std::min<int64_t>(times * kMostRows, 2 * tokens));
  part_rows = max_part_rows(tokens, tokens, context);
  adapter_columns = cuda::adapter_columns(layout);
  for (const LayerParams& layer : layout.layers) {
    int64_t& inter = layer.sparse() ? sparse_inter : dense_inter;
    inter = std::max(inter, layer.inter);
  }
  exchange = exchanged(layout);
}

// Elements of the largest part of a sum or a gather.
int64_t ForwardShape::exchanged(const Layout& layout) const {
  const ModelRecipe& recipe = layout.recipe;
  int64_t most = tokens * recipe.hidden;
  if (recipe.qk_norm == QkNorm::kProjection) most = std::max(most, tokens * kSquarePieces * layout.recipe.heads);
  if (layout.gathers) {
    for (const auto& [columns, what] : {std::pair{layout.outputs, "hidden"},
                                        {layout.q_cols(), "heads * head_dim"},
                                        {dense_inter, "the MLP"},
                                        {sparse_inter, "an expert"}}) {
      require(columns % 8 == 0, "each of " + std::to_string(layout.ranks) + " ranks has " + std::to_string(columns) +
                                    " columns of " + what + "; ranks gather multiples of 8 on GPUs");
    }
    most = std::max({most, tokens * layout.q_cols(), tokens * dense_inter});
    if (sparse_inter > 0) {
      const int64_t rows = Moe::gathered_rows(moe_shape(layout, sparse_inter), tokens);
      most = std::max(most, rows * sparse_inter);
    }
  }
  // A sum's parts are rounded up to 8 elements; a row of the other ranks' logits, in fp32, must fit (exchange.h), and
  // so must one of the other ranks' parts.
  const int64_t row = std::max({2 * layout.vocab_rows, layout.q_cols(), dense_inter, sparse_inter, layout.outputs});
  return std::max(most + 8 * layout.ranks, (layout.ranks - 1) * row);
}

int64_t ForwardShape::product_rows(int64_t count) const {
  if (!few_sizes) return count;
  if (count <= 512) return std::min<int64_t>(tokens, rounded_tokens(static_cast<int>(count)));
  const int64_t unit = count <= 2048 ? 64 : 256;
  return std::min(tokens, (count + unit - 1) / unit * unit);
}

int64_t ForwardShape::head_rows(int64_t count) const {
  return count == 0 ? 0 : std::min<int64_t>(rows, rounded_tokens(static_cast<int>(count)));
}

MoeShape moe_shape(const Layout& layout, int64_t inter) {
  return {layout.recipe.experts,
          layout.recipe.experts_per_token,
          layout.recipe.norm_topk_prob,
          layout.recipe.hidden,
          inter,
          layout.recipe.activation,
          layout.adapters.rank,
          layout.gathers ? layout.ranks : 1};
}

RankBuffers carve_buffers(const Layout& layout, const ForwardShape& shape, void* scratch, void* peer,
                          ForwardSizes& sizes) {
  const int64_t hidden = layout.recipe.hidden, tokens = shape.tokens;
  RankBuffers b{};
  Carver carver(scratch);
  b.hidden = carver.take<Element>(tokens, hidden);
  b.normed = carver.take<Element>(tokens, hidden);
  b.delta = carver.take<Element>(tokens, hidden);
  b.selected = carver.take<Element>(shape.rows, hidden);
  b.logits = carver.take<float>(shape.rows, shape.logits_ld);
  if (shape.adapter_columns > 0) b.shrunk = carver.take<Element>(std::max(tokens, shape.rows), shape.adapter_columns);
  b.gemm_bytes = kGemmBytes;
  b.gemm = carver.take<uint8_t>(kGemmBytes);
  b.sampler = carver.take<uint8_t>(sampler_scratch_bytes(shape.rows, layout.recipe.vocab));

  Carver attend = carver, dense = carver, sparse = carver;
  b.qkv = attend.take<Element>(tokens, layout.qkv_cols());
  b.attended = attend.take<Element>(tokens, layout.input_cols(layout.q_cols()));
  if (layout.recipe.qk_norm == QkNorm::kProjection) {
    // Collectives move 8 elements at a time; the padding covers the last of them.
    b.squares = attend.take<Element>(tokens, int64_t{kSquarePieces} * layout.recipe.heads);
    b.rstd = attend.take<float>(tokens, 2);
  }
  b.parts = attend.take<float>(shape.part_rows, static_cast<int64_t>(layout.heads) * (layout.recipe.head_dim + 2));
  b.gate_up = dense.take<Element>(tokens, 2 * shape.dense_inter);
  b.act = dense.take<Element>(tokens, layout.input_cols(shape.dense_inter));
  if (shape.sparse_inter > 0) {
    b.moe_bytes = Moe::scratch_bytes(moe_shape(layout, shape.sparse_inter), tokens);
    b.moe = sparse.take<uint8_t>(b.moe_bytes);
  }
  sizes.scratch = std::max({attend.used(), dense.used(), sparse.used()});

  Carver peers(peer);
  b.rope = peers.take<float>(shape.context, layout.recipe.head_dim);
  if (layout.ranks > 1) {
    b.signals = peers.take<uint64_t>(kSignalBytes / sizeof(uint64_t));
    // Collectives move 8 elements at a time; each part's padding covers the last of them.
    for (Element*& side : b.exchange) side = peers.take<Element>(shape.exchange);
  }
  sizes.peer = peers.used();
  return b;
}

ForwardSizes forward_sizes(const CoreConfig& config) {
  const Layout layout(config);
  const ForwardShape shape(config, layout);
  ForwardSizes sizes;
  sizes.kv = kv_bytes(config, layout);
  carve_buffers(layout, shape, nullptr, nullptr, sizes);
  if (config.graphs) sizes.graphs = StepGraphs::most_bytes(layout, config.sets);
  return sizes;
}

Growing::~Growing() {
  if (data_ == nullptr) return;
  if (where_ == Where::kGpu) {
    cudaFree(data_);
  } else {
    cudaFreeHost(data_);
  }
}

void Growing::reserve(size_t bytes, const char* what) {
  if (bytes <= bytes_) return;
  bytes = padded(std::max(bytes, bytes_ + bytes_ / 2));
  void* fresh = nullptr;
  const cudaError_t code =
      where_ == Where::kGpu ? cudaMalloc(&fresh, bytes) : cudaHostAlloc(&fresh, bytes, cudaHostAllocPortable);
  if (code != cudaSuccess) cudaGetLastError();  // or the next launch would be blamed
  check(code, what);
  if (data_ != nullptr) check(where_ == Where::kGpu ? cudaFree(data_) : cudaFreeHost(data_), what);
  data_ = static_cast<uint8_t*>(fresh);
  bytes_ = bytes;
}

}  // namespace refit::cuda
