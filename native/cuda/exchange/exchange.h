// The ranks of a step sum their partial results, or gather whole ones, and send their logits to rank 0: through each
// other's memory if all GPUs reach each other, else through NCCL. Both ways compute the same sums (fp32, in rank order,
// rounded once), so the results are equal bit for bit.
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

  // `epoch`: on this rank's GPU, the number of sums and gathers before this step, failed ones included; the same on all
  // ranks. A step has at most one address for it, which graphs hold.
  virtual void begin_step(const uint64_t* epoch) = 0;
  // Whether graphs may contain its sums and gathers.
  virtual bool in_graphs() const = 0;
  // `calls` sums and gathers of this step have been launched, by a graph or one by one.
  virtual void launched(uint64_t calls) = 0;
  // The memory for this rank's part of the next sum or gather: ForwardShape::exchange elements. Calls alternate between
  // the sides (0, 1).
  virtual Element* part(int side) const = 0;
  // Gathers all ranks' parts [rows, columns] into `out` [rows, ranks * columns], in rank order. columns: a multiple
  // of 8.
  virtual void gather(int side, int layer, Element* out, int64_t rows, int64_t columns) = 0;
  // Sums the first `count` elements of all ranks' parts into `out`; `layer` is for the record.
  virtual void sum(int side, int layer, Element* out, int64_t count) = 0;
  // Logits that this rank may write: [rows, ld], of which it owns columns [rank * vocab_rows, (rank + 1) * vocab_rows).
  virtual float* logits() const = 0;
  // Call it before a rank writes logits again: rank 0 has then read the block before.
  virtual void next_logits() = 0;
  // Copies all ranks' columns of the first `rows` rows to rank 0.
  virtual void gather_logits(int rows) = 0;
  // Returns when the stream has passed all its work. Throws CudaError, DeviceLost.
  virtual void wait() = 0;
};

// `buffers`: of all ranks, each reachable from this one. Clears the rank's flags on its stream.
std::unique_ptr<Exchange> peer_exchange(Rank& rank, const std::vector<RankBuffers>& buffers, bool shared_gpus);

// `own`: this rank's buffers; no other rank's memory is touched.
std::unique_ptr<Exchange> nccl_exchange(Rank& rank, const Layout& layout, const ForwardShape& shape,
                                        const RankBuffers& own, NcclComm& comm);

// One communicator of all ranks, with all connections that steps need, so that none allocates later. The ranks are on
// GPUs of their own. Throws NcclError, CudaError: the cause, if several fail.
std::vector<std::unique_ptr<NcclComm>> join_ranks(std::vector<std::unique_ptr<Rank>>& ranks, const NcclApi& api,
                                                  double seconds);

}  // namespace refit::cuda
