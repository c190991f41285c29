// Writes one job to the GPUs; GpuStore::write creates one and runs it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/pool.h"
#include "cuda/device/pinned_ring.h"
#include "cuda/scatter/scatter.h"
#include "cuda/weights/pace.h"
#include "cuda/weights/write.h"
#include "cuda/weights/write_batches.h"
#include "transport/ipc/ipc_session.h"

namespace refit::cuda {

// The state that a rank keeps for writes; created, used and destroyed on the rank's thread.
struct RankWriter {
  explicit RankWriter(size_t slots);
  ~RankWriter();
  RankWriter(const RankWriter&) = delete;
  RankWriter& operator=(const RankWriter&) = delete;

  Scatter scatter;
  // Per slot: recorded when the copy engine and the kernels have passed the rank's part of it.
  std::vector<cudaEvent_t> copied, scattered;
};

class WriteRun {
 public:
  // Plans everything; throws std::bad_alloc. Nothing has been written then.
  WriteRun(const GpuParams& params, const WriteJob& job, PinnedRing& ring,
           std::vector<std::unique_ptr<RankWriter>>& writers, std::vector<Pace>& paces, ipc::Mappings& mappings);

  // Throws DeviceLost if a GPU is lost.
  void run(Pool& pool);
  WriteOutcome outcome() const;

 private:
  // A rectangle whose source the GPUs read where it lies.
  struct Direct {
    int tensor;
    Copy2d copy;
  };

  std::vector<uint8_t> find_near();
  void plan_direct();
  void read_chunk(size_t index);
  bool fetch(const Chunk& chunk, uint8_t* slot);
  void drain_whole(Rank& rank);
  void drain(Rank& rank);
  bool read_segments(Rank& rank);
  void close_segments(bool lost);
  bool run_direct(Rank& rank);
  bool may_copy(int tensor);
  bool may_go_on(int tensor);
  bool scatter(Rank& rank, const std::vector<Copy2d>& copies, const std::vector<int>& tensors, bool from_host);
  bool enqueue(Rank& rank, size_t batch);
  void retire(Rank& rank, size_t batch);
  bool await_batch(size_t batch);
  void fail(int tensor, std::string message);

  const GpuParams& params_;
  const WriteJob& job_;
  PinnedRing& ring_;
  std::vector<std::unique_ptr<RankWriter>>& writers_;
  std::vector<Pace>& paces_;  // each rank's
  BatchPlan batches_;
  std::vector<std::vector<Direct>> direct_;              // of each rank
  std::unique_ptr<std::atomic<int64_t>[]> left_;         // of each tensor: pieces that no writer has taken yet
  std::unique_ptr<std::atomic<bool>[]> dirty_;           // tensors that may be partly written
  std::unique_ptr<std::atomic<int64_t>[]> chunks_left_;  // of each batch: chunks that are not read yet
  std::vector<uint64_t> segment_bytes_;                  // of each tensor that is read from a segment
  std::atomic<uint64_t> bytes_ = 0;
  std::atomic<bool> stop_ = false;

  std::mutex mutex_;
  std::condition_variable readers_wake_;  // a slot is free, or stop
  std::condition_variable ranks_wake_;    // a batch is read, or no more will be
  std::vector<size_t> retired_;           // of each rank: finished batches
  bool reading_ = true;
  bool broken_ = false;  // a rank ended by an exception: nothing that it took counts as written
  std::string error_;
  int error_tensor_ = -1;
  std::unique_ptr<ipc::Session> session_;
};

}  // namespace refit::cuda
