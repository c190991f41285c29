// How the ranks of a step add up their parts and bring their logits to rank 0: through each other's memory where all
// GPUs reach each other, else through NCCL. Both make the same sums, in fp32 in rank order and rounded once, so which
// of them it is shows in no bit.
//
// One object per rank, used on the rank's thread; all ranks make the same calls in the same order.
#pragma once
#include <memory>
#include <vector>

#include "core/layout.h"
#include "cuda/device/rank.h"
#include "cuda/device/types.h"
#include "cuda/forward/forward_memory.h"
#include "cuda/group/nccl.h"

namespace refit::cuda {

class Exchange {
 public:
  virtual ~Exchange() = default;

  // `epoch`: the number of sums and gathers before this step, the same on all ranks, whatever became of them.
  virtual void begin_step(uint64_t epoch) = 0;
  // Where this rank's part of the next sum goes: [T, H]. The sides (0, 1) take turns.
  virtual bf16* part(int side) const = 0;
  // The first `count` elements of all ranks' parts, added up into `out`; `layer` for the record.
  virtual void sum(int side, int layer, bf16* out, int64_t count) = 0;
  // Logits that this rank may write: [rows, ld], of which columns [rank * vocab_rows, (rank + 1) * vocab_rows) are its.
  virtual float* logits() const = 0;
  // Before a rank writes logits again: rank 0 has read the block before.
  virtual void next_logits() = 0;
  // Rank 0 has all ranks' columns of the first `rows` rows.
  virtual void gather_logits(int rows) = 0;
  // Returns when the stream has passed all of it. Throws CudaError, DeviceLost.
  virtual void wait() = 0;
};

// `buffers`: of all ranks, each within reach of this one. Clears the rank's flags on its stream.
std::unique_ptr<Exchange> peer_exchange(Rank& rank, const std::vector<RankBuffers>& buffers, bool shared_gpus);

// `own`: of this rank; no other rank's memory is touched.
std::unique_ptr<Exchange> nccl_exchange(Rank& rank, const Layout& layout, const ForwardShape& shape,
                                        const RankBuffers& own, NcclComm& comm);

// One communicator of all ranks, with every connection made that steps need, so that none allocates later. The ranks
// are on GPUs of their own. Throws NcclError, CudaError: the cause, where several fail.
std::vector<std::unique_ptr<NcclComm>> join_ranks(std::vector<std::unique_ptr<Rank>>& ranks, const NcclApi& api,
                                                  double seconds);

}  // namespace refit::cuda
