#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"
#include "cuda/exchange/exchange.h"

namespace refit::cuda {
namespace {

class PeerExchange : public Exchange {
 public:
  PeerExchange(Rank& rank, const std::vector<RankBuffers>& buffers, bool shared_gpus)
      : rank_(rank), logits_(buffers[0].logits) {
    group_.ranks = static_cast<int>(buffers.size());
    group_.rank = rank.index;
    if (shared_gpus) group_.blocks = kSharedBlocks;
    for (size_t r = 0; r < buffers.size(); ++r) {
      for (int side = 0; side < 2; ++side) group_.buffers[side][r] = buffers[r].exchange[side];
      group_.signals[r] = buffers[r].signals;
    }
    check(cudaMemsetAsync(group_.signals[rank.index], 0, kSignalBytes, rank.stream), "clear flags");
  }

  void begin_step(const uint64_t* epoch) override { epoch_ = epoch, calls_ = 0; }
  bool in_graphs() const override { return true; }
  void launched(uint64_t calls) override { calls_ = calls; }
  Element* part(int side) const override { return group_.buffers[side][rank_.index]; }
  void sum(int side, int layer, Element* out, int64_t count) override {
    rank_.begin_op("all_reduce", layer);
    all_reduce(group_, side, out, count, {++calls_, epoch_}, rank_.stream);
  }
  void gather(int side, int layer, Element* out, int64_t rows, int64_t columns) override {
    rank_.begin_op("all_gather", layer);
    all_gather(group_, side, out, rows, columns, {++calls_, epoch_}, rank_.stream);
  }
  // Rank 0's memory for all ranks: every rank writes its columns there.
  float* logits() const override { return logits_; }
  void next_logits() override { meet(); }
  void gather_logits(int) override { meet(); }
  void wait() override {
    rank_.doing("wait for the step");
    check(cudaStreamSynchronize(rank_.stream), "the step");
  }

 private:
  void meet() {
    rank_.begin_op("barrier");
    barrier(group_, {++calls_, epoch_}, rank_.stream);
  }

  Rank& rank_;
  float* const logits_;
  PeerGroup group_;
  const uint64_t* epoch_ = nullptr;
  uint64_t calls_ = 0;  // of this step
};

}  // namespace

std::unique_ptr<Exchange> peer_exchange(Rank& rank, const std::vector<RankBuffers>& buffers, bool shared_gpus) {
  return std::make_unique<PeerExchange>(rank, buffers, shared_gpus);
}

}  // namespace refit::cuda
