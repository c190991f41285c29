// CUDA graphs of the layers of short steps (attention.h): one launch instead of hundreds. A graph holds addresses and
// grids, so it serves all steps of one StepRoom and set of weights whose block begins at the same address. Weights and
// the KV cache stay where they are for the engine's life, whatever is written into them and also over release and
// resume, so updates need no new graph. Graphs of all sets are made together: the first steps after the sets change
// places find theirs.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <list>
#include <vector>

#include "core/layout.h"
#include "cuda/device/rank.h"
#include "cuda/forward/step_room.h"

namespace refit::cuda {

// One per rank, used on its thread while its GPU is current.
class StepGraphs {
 public:
  // Not enabled: each run launches.
  StepGraphs(Rank& rank, bool enabled, int sets);
  ~StepGraphs() { clear(); }
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Whether the room was seen once and has no graph.
  bool wants(const StepRoom& room) const;
  // Makes the room's graphs of what `launch` launches on the rank's stream with each set. Without memory for them, no
  // graph is made from now on.
  void make(const StepRoom& room, const std::function<void(int set)>& launch);
  // Does what `launch` does: by the room's graph, or itself if there is none. (The first time kernels are loaded, which
  // a capture must not do.)
  void run(const StepRoom& room, int set, const std::function<void(int set)>& launch);
  // Call it when an address changes that graphs hold. No step may be running.
  void clear();
  size_t size() const;

  // Memory of all graphs on one GPU, at most.
  static size_t most_bytes(const Layout& layout, int sets);

  // Rooms that have graphs. There are fewer in steps of up to 512 tokens with short sequences; the room that ran
  // longest ago leaves.
  static constexpr size_t kMost = 64;

 private:
  struct Entry {
    StepRoom room;
    std::vector<cudaGraphExec_t> graphs;  // by set; none: seen once
  };
  static void destroy(Entry& entry);

  std::list<Entry>::iterator find(const StepRoom& room);
  // Null if there is no memory for it.
  cudaGraphExec_t capture(int set, const std::function<void(int)>& launch);

  Rank& rank_;
  bool enabled_;
  const int sets_;
  std::list<Entry> entries_;  // the one that ran last first
};

}  // namespace refit::cuda
