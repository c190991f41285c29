// The launches of one rank's part of a step. All of it runs on the rank's thread, with its GPU current.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "core/layout.h"
#include "cuda/adapters/adapter_pass.h"
#include "cuda/exchange/exchange.h"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/forward.h"
#include "cuda/forward/forward_memory.h"
#include "cuda/forward/prepared_step.h"
#include "cuda/forward/step_graphs.h"
#include "cuda/gemm/gemm.h"
#include "cuda/moe/moe.h"

namespace refit::cuda {

class RankForward {
 public:
  // `own`: this rank's buffers. `exchange`: with the other ranks, null if there are none. Initialises the rank's own
  // tables; no step may run before all ranks exist.
  RankForward(const CoreConfig& config, const Layout& layout, const ForwardShape& shape, Rank& rank,
              const ForwardMemory& memory, const RankBuffers& own, const std::vector<float>& rope,
              std::unique_ptr<Exchange> exchange);

  // A step's page lists, histories and results may grow; these sizes are allocated at the start and fit most steps.
  static constexpr size_t kFirstBlock = size_t{4} << 20, kFirstResults = size_t{1} << 20;
  // Makes room for the blocks of a step; no rank may be computing.
  void reserve(size_t block_bytes, size_t result_bytes);
  // Loads the kernels for the products of steps with this many tokens or rows (see Gemm::load); no rank may be
  // computing. With other ranks, a step that was not prepared is refused.
  void load_for_tokens(int tokens, int set);
  void load_for_rows(int rows, int set);
  // Whether the step needs a graph that does not exist yet and that `run` will not make, because other ranks must not
  // compute meanwhile.
  bool wants_graph(const PreparedStep& step) const;
  // Makes that graph; no rank may be computing.
  void make_graph(const PreparedStep& step);
  // Returns when the GPU has finished its part.
  void run(const PreparedStep& step);

  // Number of collectives of a step on each rank.
  static uint64_t collectives(const Layout& layout, const ForwardShape& shape, int64_t tokens, int64_t rows);
  // The same without the head.
  static uint64_t in_layers(const Layout& layout, int64_t tokens);

  // No step may be running.
  void drop_graphs() { graphs_.clear(); }
  size_t graphs() const { return graphs_.size(); }

 private:
  bool may_use_graphs(const PreparedStep& step) const {
    return step.room.is_rounded && (!exchange_ || exchange_->in_graphs());
  }
  StepView view(const PreparedStep& step) const;
  // Computes with the weights of `set`, as the functions below do from then on.
  void layers(const StepView& view, const PreparedStep& step, int set);
  void embed_tokens(const StepView& view, int count);
  void attend(const StepView& view, int layer, int count);
  void mlp(const StepView& view, int layer, const PreparedStep& step);
  void head(const StepView& view, const PreparedStep& step);
  // The statistics of q's and k's norms, where they cover all ranks' heads.
  HeadNorms head_norms(int layer, int count);
  // Adds delta (and the bias, if any) to the residual stream, with the norm before or after it. `next`: the norm of the
  // linear that follows (kPre); -1: none.
  void add_delta(int bias, int own_norm, int next_norm, int count);
  // The input of the next linear: normed, or the residual stream itself if norms come after.
  const Element* linear_input() const {
    return layout_.recipe.norm_placement == NormPlacement::kPre ? own_.normed : own_.hidden;
  }
  // The memory for this rank's part of the next sum or gather, and the sum of all ranks' parts into `out`. The two
  // sides of the exchange take turns (see all_reduce.h).
  Element* part() const { return exchange_ ? exchange_->part(side_) : own_.delta; }
  void sum(int layer, int64_t elements, Element* out);
  // If ranks gather (Layout::gathers), a kernel writes this rank's [rows, own] inputs of o or down to `part`, and
  // `gather` makes [rows, ranks * own] of them in `all`. Else it writes to `all`, which is this rank's.
  Element* input_part(Element* all) const { return layout_.gathers ? part() : all; }
  void gather(int layer, int64_t rows, int64_t own, Element* all);
  // The outputs of o or down on all ranks, from `part` to delta [rows, hidden].
  void finish_delta(int layer, int64_t rows);

  Product qkv(int layer, int count) const;
  Product o(int layer, int count) const;
  Product gate_up(int layer, int count) const;
  Product down(int layer, int count) const;
  Product lm_head(int count) const;

  const Element* param(int id) const { return id < 0 ? nullptr : params_[static_cast<size_t>(set_)][id]; }
  KvLayer kv_layer(int layer) const;

  const Layout& layout_;
  const ForwardShape& shape_;
  Rank& rank_;
  const std::vector<std::vector<const Element*>> params_;  // by set
  int set_ = 0;                                            // of weights, for the next launch
  Element* const kv_;
  const int pages_, page_size_;
  const RankBuffers own_;
  const std::unique_ptr<Exchange> exchange_;
  int side_ = 1;  // of the exchange, for the next sum
  Gemm gemm_;
  AdapterPass adapters_;
  std::map<int64_t, Moe> moe_;  // by columns of an expert
  Growing block_{Growing::Where::kGpu}, results_{Growing::Where::kGpu};
  StepGraphs graphs_;
};

}  // namespace refit::cuda
