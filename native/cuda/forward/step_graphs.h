// CUDA graphs of the layers of decode steps: one launch instead of hundreds. A graph holds addresses and grids, so it
// serves all steps of one StepRoom whose block begins at the same address. Weights and the KV cache stay where they are
// for the engine's life, whatever is written into them and also over release and resume, so updates need no new graph.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <list>

#include "cuda/device/rank.h"
#include "cuda/forward/step_room.h"

namespace refit::cuda {

// One per rank, used on its thread while its GPU is current.
class StepGraphs {
 public:
  explicit StepGraphs(Rank& rank);
  ~StepGraphs() { clear(); }
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Does what `launch` does, which launches kernels on the rank's stream: itself the first time that it sees a room
  // (kernels are loaded then, which a capture must not), by a graph afterwards. Without memory for graphs, always
  // itself.
  void run(const StepRoom& room, const std::function<void()>& launch);
  // Call it when an address changes that graphs hold. No step may be running.
  void clear();
  size_t size() const;

  // More than the rooms of steps of up to 512 tokens with short sequences; the graph that ran longest ago makes room.
  static constexpr size_t kMost = 64;

 private:
  struct Entry {
    StepRoom room;
    cudaGraphExec_t graph;  // null: seen once
  };

  Entry* find(const StepRoom& room);
  cudaGraphExec_t capture(const std::function<void()>& launch);

  Rank& rank_;
  bool enabled_;
  std::list<Entry> entries_;  // the one that ran last first
};

}  // namespace refit::cuda
