#include "transport/ipc/ipc_session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/fault.h"
#include "core/look.h"
#include "transport/ipc/ipc_messages.h"

namespace refit::ipc {

Session::Session(Mappings& mappings, const WriteJob& job, Fail fail, const SessionLimits& limits)
    : mappings_(mappings),
      job_(job),
      fail_(std::move(fail)),
      limits_(limits),
      deadline_(std::chrono::steady_clock::now() + std::chrono::milliseconds(job.event_timeout_ms)) {
  IpcPlan plan = plan_segments(job, mappings.driver.ranks());
  for (const PlannedEvent& event : plan.events) events_.push_back({event, 0, false});
  ranks_.resize(plan.ranks.size());
  for (size_t r = 0; r < ranks_.size(); r++) {
    size_t missing = 0;
    ranks_[r].segments.reserve(plan.ranks[r].size());
    for (PlannedSegment& planned : plan.ranks[r]) {
      Opened opened;
      const Mapping* kept = mappings.find(static_cast<int>(r), job.segments[planned.segment], planned.keep);
      if (kept != nullptr) opened.mapping = *kept;
      missing += kept == nullptr;
      opened.plan = std::move(planned);
      ranks_[r].left += opened.plan.bytes;
      ranks_[r].segments.push_back(std::move(opened));
    }
    wait_for_all_ = wait_for_all_ && (missing <= limits.few || plan.ranks.size() > 1);
  }
}

Session::~Session() {
  try {
    close(true);
  } catch (const std::exception&) {
  }
}

bool Session::empty() const {
  return events_.empty() &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const RankState& rank) { return rank.segments.empty(); });
}

void Session::open() {
  for (Event& event : events_) {
    if (stopped_) break;
    open_event(event);
  }
  for (const Event& event : events_) await_event(event);
  {
    const std::lock_guard lock(mutex_);
    events_done_ = true;
  }
  wake_.notify_all();
  destroy_events();
}

void Session::open_event(Event& event) {
  try {
    if (REFIT_FAULT(kIpcEvent)) throw Refused(Cause::kUnknown, "injected fault: event");
    event.id = mappings_.driver.open_event(event.plan.rank, event.plan.handle);
    event.open = true;
  } catch (const Refused& e) {
    fail(event.plan.tensor, cannot_open_event(e));
  }
}

void Session::open_segment(int rank, Opened& segment) {
  const Segment& named = job_.segments[segment.plan.segment];
  if (cancelled()) return fail(segment.plan.tensor, "the write was cancelled");
  if (segment.mapping.base == 0) {
    try {
      if (REFIT_FAULT(kIpcOpen)) throw Refused(Cause::kUnknown, "injected fault: open");
      segment.mapping = mappings_.driver.open(rank, named);
      segment.ours = true;
      opened_++;
    } catch (const Refused& e) {
      return fail(segment.plan.tensor, cannot_open(e, named));
    }
  }
  for (const auto& [tensor, end] : segment.plan.ends) {
    if (end > segment.mapping.bytes) return fail(tensor, too_short(end, segment.mapping.bytes));
  }
}

void Session::await_event(const Event& event) {
  Backoff backoff;
  try {
    while (!stopped_ && !mappings_.driver.event_done(event.plan.rank, event.id)) {
      if (cancelled()) {
        fail(event.plan.tensor, "the write was cancelled");
      } else if (std::chrono::steady_clock::now() > deadline_) {
        fail(event.plan.tensor,
             "its sender's work on the GPU was not done after " + std::to_string(job_.event_timeout_ms) +
                 " ms: send tensors after the work that computes them is enqueued, and put no work that "
                 "waits for this update before them on the stream");
      } else {
        backoff.sleep();
      }
    }
  } catch (const Refused& e) {
    fail(event.plan.tensor, cannot_open_event(e));
  }
}

bool Session::begin() {
  std::unique_lock lock(mutex_);
  // Waits for all events, also those of segments that other ranks read, so a refusal here has changed nothing.
  wake_.wait(lock, [this] { return stopped_ || events_done_; });
  return !stopped_;
}

void Session::destroy_events() {
  for (Event& event : events_) {
    if (!event.open) continue;
    event.open = false;
    try {
      mappings_.driver.close_event(event.plan.rank, event.id);
    } catch (const std::exception& e) {
      warning_ = std::string("a CUDA event of a sender was not destroyed: ") + e.what();
    }
  }
}

// Opens the next segments: a batch of them, or all. The first batch is small because the GPU then begins early. The
// last batches are small because the GPU then ends soon after the last segment is open.
void Session::open_some(int rank) {
  RankState& state = ranks_[static_cast<size_t>(rank)];
  if (state.open == state.segments.size()) return;
  const uint64_t enough = std::min(state.given == 0 ? limits_.batch_bytes / 16 : limits_.batch_bytes, state.left / 2);
  do {
    open_segment(rank, state.segments[state.open]);
    if (stopped_) return;
    const uint64_t bytes = state.segments[state.open++].plan.bytes;
    state.waiting += bytes;
    state.left -= bytes;
  } while (state.open < state.segments.size() && (wait_for_all_ || state.waiting < enough));
}

bool Session::next(int rank, size_t& first, size_t& last) {
  RankState& state = ranks_[static_cast<size_t>(rank)];
  if (stopped_) return false;
  if (state.open == state.given) open_some(rank);
  if (wait_for_all_ && state.given == 0) {
    std::unique_lock lock(mutex_);
    if (++ready_ == ranks_.size()) wake_.notify_all();
    wake_.wait(lock, [&] { return stopped_ || ready_ == ranks_.size(); });
  }
  if (stopped_ || state.given == state.segments.size()) return false;
  first = state.given;
  last = state.given = state.open;
  state.waiting = 0;
  return true;
}

void Session::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
}

void Session::fail(int tensor, const std::string& message) {
  fail_(tensor, message);
  stop();
}

void Session::close(bool failed) {
  if (done_) return;
  done_ = true;
  std::vector<Mappings::Open> open;
  for (size_t r = 0; r < ranks_.size(); r++) {
    for (const Opened& segment : ranks_[r].segments) {
      if (!segment.ours) continue;
      const std::string& name = segment.plan.keep;
      const int rank = static_cast<int>(r);
      if (!failed && !name.empty() &&
          mappings_.keep(rank, job_.segments[segment.plan.segment], name, segment.mapping)) {
        continue;
      }
      open.push_back({rank, segment.mapping});
    }
  }
  destroy_events();
  closed_ = mappings_.close(std::move(open));
  const std::string open_still = mappings_.warning();
  if (!open_still.empty()) warning_ += (warning_.empty() ? "" : "; ") + open_still;
}

}  // namespace refit::ipc
