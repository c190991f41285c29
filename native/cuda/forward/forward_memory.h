// The layout of one rank's scratch, KV and peer memory, and the blocks that carry steps.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/layout.h"
#include "cuda/device/types.h"
#include "cuda/forward/forward.h"
#include "cuda/moe/moe.h"

namespace refit::cuda {

// Sizes of a step's buffers, the same for all ranks.
struct ForwardShape {
  // Throws std::invalid_argument.
  ForwardShape(const CoreConfig& config, const Layout& layout);

  int64_t tokens;                     // maximum number of new tokens of a step
  int64_t context;                    // tokens of the longest sequence
  int64_t rows;                       // maximum number of rows whose logits are computed at a time
  int64_t logits_ld;                  // floats per row of logits: all ranks' shards of the vocabulary, side by side
  int64_t part_rows;                  // for attention
  int64_t exchange;                   // elements of one exchange buffer
  int64_t adapter_columns;            // of the products with A; 0: no adapters
  int64_t dense_inter, sparse_inter;  // the widest of all layers, for one rank; 0 for none
  bool few_sizes;                     // product_rows rounds

  // Rows that the products of a layer compute for `count` tokens. With CoreConfig::deterministic the kernels of each
  // number are chosen by trials, so there are few: the rows are rounded up, above 512 by an eighth at most. Nothing
  // reads the results of the others.
  int64_t product_rows(int64_t count) const;
  // Rows that the head computes for `count` rows: rounded up, so that few sizes of its product are needed. Nothing
  // reads the results of the others.
  int64_t head_rows(int64_t count) const;

 private:
  int64_t exchanged(const Layout& layout) const;
};

MoeShape moe_shape(const Layout& layout, int64_t inter);

struct RankBuffers {
  // Scratch. hidden [T, H] is the residual stream, normed [T, H] its norm (NormPlacement::kPre), delta [T, H] the
  // output of attention or MLP that is added next.
  Element *hidden, *normed, *delta;
  Element *qkv, *attended;  // [T, (nq + 2 nkv) hd], [T, Layout::input_cols(nq hd)]
  float* parts;             // [part_rows, nq, hd + 2]
  // With QkNorm::kProjection: [T, all heads, kSquarePieces] and [T, 2] (elementwise.h).
  Element* squares;
  float* rstd;
  Element *gate_up, *act;  // [T, 2 I], [T, Layout::input_cols(I)]; in the place of qkv to parts
  Element* selected;       // [rows, H]
  float* logits;           // [rows, logits_ld]; all ranks that reach rank 0's write to it
  Element* shrunk;         // [T or rows, adapter_columns]; null without adapters
  void* moe;
  size_t moe_bytes;
  void* gemm;
  size_t gemm_bytes;
  void* sampler;
  // Peer memory. The exchange buffers and signals only with several ranks.
  float* rope;  // [context, hd]
  uint64_t* signals;
  Element* exchange[2];  // of ForwardShape::exchange elements
};

// Divides both regions among the buffers; with null bases it only counts the sizes.
RankBuffers carve_buffers(const Layout& layout, const ForwardShape& shape, void* scratch, void* peer,
                          ForwardSizes& sizes);

// Memory that grows when needed, between steps: on a GPU, or pinned on the host.
class Growing {
 public:
  enum class Where : uint8_t { kGpu, kHost };
  explicit Growing(Where where) : where_(where) {}
  ~Growing();
  Growing(const Growing&) = delete;
  Growing& operator=(const Growing&) = delete;

  // Makes room for at least `bytes`; the contents are undefined afterwards. Call it on a rank's thread while no rank
  // computes: the driver may wait for its GPUs. Throws CudaError that names `what`.
  void reserve(size_t bytes, const char* what);
  size_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }

 private:
  const Where where_;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace refit::cuda
