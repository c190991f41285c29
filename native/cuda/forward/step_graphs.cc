#include "cuda/forward/step_graphs.h"

#include <algorithm>

#include "cuda/device/check.h"

namespace refit::cuda {
namespace {

// Launches of a layer at most, alone, with other ranks and with adapters, and the memory of one in a graph
// (graph_memory_test).
constexpr size_t kLayerLaunches = 18, kExchangeLaunches = 8, kAdapterLaunches = 14, kLaunchBytes = 2048;

struct Graph {
  cudaGraph_t graph = nullptr;
  ~Graph() {
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

// Ends the capture also if a launch throws.
class Capture {
 public:
  Capture(Rank& rank, Graph& to) : rank_(rank), to_(to) {
    // Other threads may allocate meanwhile.
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "begin the capture of a step");
    rank.progress().mute(true);
  }
  ~Capture() {
    rank_.progress().mute(false);
    if (open_ && cudaStreamEndCapture(rank_.stream, &to_.graph) != cudaSuccess) cudaGetLastError();
  }
  void end() {
    open_ = false;
    check(cudaStreamEndCapture(rank_.stream, &to_.graph), "end the capture of a step");
  }

 private:
  Rank& rank_;
  Graph& to_;
  bool open_ = true;
};

}  // namespace

size_t StepGraphs::most_bytes(const Layout& layout, int sets) {
  const size_t launches =
      kLayerLaunches + (layout.ranks > 1 ? kExchangeLaunches : 0) + (layout.adapters.slots > 0 ? kAdapterLaunches : 0);
  return kMost * static_cast<size_t>(sets) * layout.layers.size() * launches * kLaunchBytes;
}

StepGraphs::StepGraphs(Rank& rank, bool enabled, int sets)
    : rank_(rank), enabled_(enabled && !rank.progress().launches_each()), sets_(sets) {}

std::list<StepGraphs::Entry>::iterator StepGraphs::find(const StepRoom& room) {
  return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.room == room; });
}

bool StepGraphs::wants(const StepRoom& room) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& e) { return e.room == room && e.graphs.empty(); });
}

void StepGraphs::make(const StepRoom& room, const std::function<void(int)>& launch) {
  const auto entry = find(room);
  if (entry == entries_.end() || !entry->graphs.empty()) return;
  // For all sets, or for none.
  Entry made{room, {}};
  try {
    for (int set = 0; set < sets_; set++) {
      const cudaGraphExec_t graph = capture(set, launch);
      if (graph == nullptr) {
        destroy(made);
        clear();
        enabled_ = false;
        return;
      }
      made.graphs.push_back(graph);
    }
  } catch (...) {
    destroy(made);
    throw;
  }
  entry->graphs = std::move(made.graphs);
}

void StepGraphs::run(const StepRoom& room, int set, const std::function<void(int)>& launch) {
  const auto entry = find(room);
  if (entry == entries_.end()) {
    launch(set);
    if (enabled_) entries_.push_front({room, {}});
    if (entries_.size() <= kMost) return;
    destroy(entries_.back());
    entries_.pop_back();
    return;
  }
  entries_.splice(entries_.begin(), entries_, entry);
  if (entry->graphs.empty()) return launch(set);
  rank_.begin_op("the layers of a step, as a graph");
  check(cudaGraphLaunch(entry->graphs[static_cast<size_t>(set)], rank_.stream), "launch a graph");
}

cudaGraphExec_t StepGraphs::capture(int set, const std::function<void(int)>& launch) {
  rank_.doing("capture a step");
  Graph graph;
  {
    Capture capture(rank_, graph);
    launch(set);
    capture.end();
  }
  cudaGraphExec_t exec = nullptr;
  const cudaError_t code = cudaGraphInstantiate(&exec, graph.graph, 0);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // or the next launch would be blamed
    return nullptr;
  }
  check(code, "make a graph of a step");
  try {
    check(cudaGraphUpload(exec, rank_.stream), "upload a graph");
    check(cudaStreamSynchronize(rank_.stream), "upload a graph");
  } catch (...) {
    cudaGraphExecDestroy(exec);
    throw;
  }
  return exec;
}

size_t StepGraphs::size() const {
  size_t count = 0;
  for (const Entry& entry : entries_) count += entry.graphs.size();
  return count;
}

void StepGraphs::destroy(Entry& entry) {
  for (const cudaGraphExec_t graph : entry.graphs) cudaGraphExecDestroy(graph);
}

void StepGraphs::clear() {
  for (Entry& entry : entries_) destroy(entry);
  entries_.clear();
}

}  // namespace refit::cuda
