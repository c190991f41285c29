// All that a CUDA device has: its ranks, their memory, the forward pass and the weight stores.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/model.h"
#include "cuda/device/device.h"
#include "cuda/device/memory.h"
#include "cuda/exchange/exchange.h"
#include "cuda/forward/forward.h"
#include "cuda/weights/write.h"

namespace refit::cuda {

// Shared with the threads: a thread that is stuck in an operation keeps alive what it uses.
struct CudaDevice::State {
  explicit State(const CoreConfig& config) : config(config) {}
  ~State() { close(); }

  void start();
  void close() noexcept;
  void check_room(const std::vector<int>& gpus);
  void require_available(uint32_t tags) const;
  uint64_t release(uint32_t tags, bool keep_weights);
  bool resume(uint32_t tags);
  // The same for one set of weights alone, on the ranks for operations beside steps.
  uint64_t drop(int set);
  void restore(int set);

  const CoreConfig config;
  CudaMemoryPlan plan;
  std::string description;
  std::map<int, std::string> uuids;  // of the GPUs
  std::shared_ptr<Health> health = std::make_shared<Health>();
  uint32_t released = 0;  // MemoryTag bits
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<Rank>> beside_ranks;  // for Access::beside: threads and streams of their own
  std::vector<std::unique_ptr<NcclComm>> comms;     // empty where GPUs reach each other
  std::vector<std::unique_ptr<RankMemory>> memory;
  std::unique_ptr<Forward> forward;
  std::unique_ptr<GpuStore> store, beside_store;  // the second where parameters are written beside steps

  GpuStore& store_for(Access access);
  void require_weights(int set) const;
};

}  // namespace refit::cuda
