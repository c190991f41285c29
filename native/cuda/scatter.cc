#include "cuda/scatter.h"

#include <array>
#include <stdexcept>

#include "cuda/scatter_kernel.h"
#include "cuda/scatter_plan.h"
#include "cuda/scatter_segment.h"

namespace refit::cuda {

struct Scatter::State {
  uint32_t tile_bytes;
  // Lists that can be under way before the host waits for the oldest.
  std::array<ScatterSegment, 4> segments;
  size_t next = 0;
};

Scatter::Scatter(uint32_t tile_bytes) : state_(std::make_unique<State>()) { state_->tile_bytes = tile_bytes; }

Scatter::~Scatter() = default;

void Scatter::run(const std::vector<Copy2d>& copies, cudaStream_t stream) {
  for (size_t from = 0; from < copies.size();) {
    ScatterSegment& segment = state_->segments[state_->next];
    state_->next = (state_->next + 1) % state_->segments.size();
    ScatterList list = segment.list();
    const size_t planned = plan_scatter(copies, from, state_->tile_bytes, list);
    if (planned == from) throw std::length_error("scatter: a copy is too large for one launch");
    from = planned;
    if (list.count == 0) continue;
    launch_scatter(segment.upload(list, stream), stream);
    segment.mark(stream);
  }
}

}  // namespace refit::cuda
