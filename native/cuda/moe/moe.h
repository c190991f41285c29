// A mixture of experts as Hugging Face's Qwen3Moe computes it: softmax over the router's rounded logits in fp32, the k
// best (ties to the lower expert), optionally renormalised, weights rounded to Element; each token's experts are summed
// in ascending order of expert id, every product and partial sum rounded to Element (native/cpu/moe.cc is the
// reference).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/model.h"
#include "cuda/device/types.h"
#include "cuda/gemm/gemm.h"

namespace refit::cuda {

struct MoeShape {
  int experts, per_token;
  bool norm_topk_prob;
  int64_t hidden, inter;  // inter: of one expert on this rank
  Activation activation = Activation::kSilu;
  int adapter_rank = 0;  // of the slots; 0: the layer takes no adapters
  int gathered = 1;      // ranks whose activations this rank gathers; it then computes its share of w2's rows

  int64_t outputs() const { return hidden / gathered; }  // rows of one expert's w2
  int64_t depth() const { return inter * gathered; }     // columns of w2
};

// How ranks gather rows. The parts that follow each other lie in different memory (cuda/exchange/exchange.h).
struct RowGather {
  std::function<Element*()> part;  // this rank's memory for the next rows
  // The rows of all ranks -> all [rows, ranks * columns].
  std::function<void(Element* all, int64_t rows, int64_t columns)> gather;
};

// The adapters of one layer's experts (core/adapters.h), on the GPU. a13 or a2 null: that product takes none.
struct MoeAdapters {
  const Element *a13 = nullptr, *b13 = nullptr, *a2 = nullptr, *b2 = nullptr;
  const float* table = nullptr;          // the row of gate in slot 0; up and down follow
  int64_t slot_floats = 0;               // of the table, from slot to slot
  const int32_t* token_slots = nullptr;  // [T]; null: the step uses no adapters
};

// The kernel of the experts' products. The number: rows of one expert that a block takes at most (rows_of).
enum class ExpertKernel {
  kAuto,     // the number of tokens decides
  kStream8,  // few rows at the speed of memory, by mma.sync
  kStream16,
  kTile64,  // tiles by mma.sync; operands that no other kernel can read use this one
  kTile128,
  kWgmma64,   // compute capability 9.0: at the speed of memory
  kWgmma256,  // the same, for many rows
};
constexpr int rows_of(ExpertKernel kernel) {
  switch (kernel) {
    case ExpertKernel::kStream8:
      return 8;
    case ExpertKernel::kStream16:
      return 16;
    case ExpertKernel::kTile128:
      return 128;
    case ExpertKernel::kWgmma256:
      return 256;
    default:
      return 64;
  }
}

// A copy of the choice: the experts of token t at to[t * stride ...], best first. On the GPU.
struct RouteRecord {
  uint16_t* to = nullptr;
  int64_t stride = 0;
};

class Moe {
 public:
  // Bytes of scratch that `run` needs for at most `tokens` tokens.
  static size_t scratch_bytes(const MoeShape& shape, int64_t tokens);
  // `scratch`: GPU memory, aligned to 256 bytes; nothing in it outlives a run. It may be smaller than all tokens need;
  // they are then computed in several turns. Throws std::invalid_argument if the shape or the scratch does not work.
  // The GPU must be current.
  Moe(const MoeShape& shape, Gemm& gemm, void* scratch, size_t scratch_bytes);

  // x [T, hidden]; router [E, hidden]; w13 [E * 2 inter, hidden]; w2 [E * outputs, depth]. With one rank, or with ranks
  // that gather (`gather` not null), y [T, hidden] is the finished sum. With others (partial true) an expert's output
  // is a partial sum over the ranks' parts of inter, and rounding must wait: y is then this rank's weighted fp32 sum,
  // rounded, for the all-reduce. y must not be x. The host never waits for the GPU, and grids depend on count
  // only. Adapters add their part to the products of w13 and w2 in fp32, before their results are rounded; of w2 with
  // one rank, after that. kv_slots [T] marks tokens that are padding by negative entries; null: none is. They use no
  // expert, and their y is undefined.
  void run(const Element* x, const Element* router, const Element* w13, const Element* w2, Element* y, int64_t count,
           bool partial, cudaStream_t stream, RouteRecord record = {}, const MoeAdapters& adapters = {},
           const int32_t* kv_slots = nullptr, const RowGather* gather = nullptr);
  // Number of gathers of a `run`.
  static int64_t gathers(int64_t count);
  // The most rows of one of them.
  static int64_t gathered_rows(const MoeShape& shape, int64_t count);
  // The counterpart of Gemm::load. With its SumOrder::kAscending `run` chooses from kernels that give the same bits.
  void load(const Element* x, const Element* router, int64_t count, cudaStream_t stream);

  // For tests and benchmarks. Operands that the kernel cannot read use kTile64, and so does a GPU without wgmma.
  void force(ExpertKernel kernel) { forced_ = kernel; }
  bool has_wgmma() const { return has_wgmma_; }

 private:
  // Calls fn(first token, tokens) for each turn of `count` tokens; not at all if there are none.
  template <class F>
  void in_turns(int64_t count, F&& fn) const;
  ExpertKernel choose(const Element* x, const Element* w13, const Element* w2, int64_t count) const;
  Product routing(const Element* x, const Element* router, int64_t count) const;
  void run_turn(const Element* x, const Element* router, const Element* w13, const Element* w2, Element* y,
                int64_t count, bool partial, cudaStream_t stream, RouteRecord record, const MoeAdapters& adapters,
                const int32_t* kv_slots, const RowGather* gather);

  MoeShape shape_;
  Gemm& gemm_;
  void* scratch_;
  size_t scratch_bytes_;
  int64_t turn_ = 0;  // maximum number of tokens of one turn
  ExpertKernel forced_ = ExpertKernel::kAuto;
  bool has_wgmma_ = false;
  int processors_ = 0;  // multiprocessors of the GPU
};

}  // namespace refit::cuda
