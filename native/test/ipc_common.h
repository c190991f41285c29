// A driver for memory of other processes that counts calls and refuses wrong ones, and jobs for it.
#pragma once
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/store.h"
#include "core/write/write_check.h"
#include "test/check.h"
#include "transport/ipc/ipc_descriptor.h"
#include "transport/ipc/ipc_messages.h"
#include "transport/ipc/ipc_session.h"

namespace refit::test::ipc_world {

using ipc::Cause;
using ipc::Mapping;
using ipc::Refused;

constexpr uint64_t kSegmentBytes = 4096;

class CountingDriver : public ipc::Driver {
 public:
  explicit CountingDriver(int ranks) : ranks_(ranks) {}
  int ranks() const override { return ranks_; }

  Mapping open(int rank, const Segment& segment) override {
    if (slow) std::this_thread::sleep_for(std::chrono::microseconds(next_++ * 7919 % 97));
    const std::lock_guard lock(mutex_);
    if (++opens == fail_open) throw Refused(Cause::kGone, "no such handle");
    const uint64_t base = next_ << 32;
    next_++;
    live_[base] = rank;
    order.emplace_back(rank, segment.handle.empty() ? segment.fds[0] : segment.handle[0]);
    return {base, segment.handle.empty() ? segment.block_bytes * segment.blocks() : kSegmentBytes,
            segment.handle.empty()};
  }
  void close(int rank, const Mapping& mapping) override {
    const std::lock_guard lock(mutex_);
    if (++closes == fail_close) throw Refused(Cause::kUnknown, "cannot close");
    const auto found = live_.find(mapping.base);
    if (CHECK(found != live_.end()) && CHECK(found->second == rank)) live_.erase(found);
  }
  uint64_t open_event(int rank, const uint8_t* handle) override {
    const std::lock_guard lock(mutex_);
    if (++event_opens == fail_event) throw Refused(Cause::kGone, "no such event");
    const uint64_t id = next_++;
    events_[id] = {rank, handle[0], false};
    return id;
  }
  bool event_done(int rank, uint64_t event) override {
    const std::lock_guard lock(mutex_);
    if (CHECK(events_.count(event) == 1)) CHECK(events_[event].rank == rank);
    if (looks_until_done < 0 || looks++ < looks_until_done) return false;
    if (!std::exchange(events_[event].done, true)) done++;
    return true;
  }
  void close_event(int rank, uint64_t event) override {
    const std::lock_guard lock(mutex_);
    if (CHECK(events_.count(event) == 1)) CHECK(events_[event].rank == rank);
    events_.erase(event);
  }

  // True if all open events are done. A failed write closes its events without waiting.
  bool all_done() {
    const std::lock_guard lock(mutex_);
    return std::all_of(events_.begin(), events_.end(), [](const auto& event) { return event.second.done; });
  }
  size_t live() const { return live_.size(); }
  size_t live_events() const { return events_.size(); }

  bool slow = false;  // calls of open end in any order
  int fail_open = -1, fail_event = -1, fail_close = -1, looks_until_done = 0;
  std::atomic<int> opens = 0, closes = 0, event_opens = 0, done = 0, looks = 0;
  std::vector<std::pair<int, int>> order;  // rank, first byte of the handle

 private:
  struct Event {
    int rank = 0;
    int name = 0;
    bool done = false;
  };
  const int ranks_;
  std::mutex mutex_;
  std::atomic<uint64_t> next_ = 1;
  std::map<uint64_t, int> live_;
  std::map<uint64_t, Event> events_;
};

inline Segment segment(int name, std::vector<int> events = {}, std::string keep = "") {
  Segment out;
  out.uuid = "GPU-0";
  out.handle.assign(Segment::kHandleBytes, 0);
  out.handle[0] = static_cast<uint8_t>(name);
  out.handle[1] = static_cast<uint8_t>(name >> 8);
  for (const int event : events) {
    out.events.resize(out.events.size() + Segment::kHandleBytes);
    out.events[out.events.size() - Segment::kHandleBytes] = static_cast<uint8_t>(event);
  }
  out.keep = std::move(keep);
  return out;
}

inline int add_source(WriteJob& job, Segment of) {
  Source source;
  source.segment = static_cast<int>(job.segments.size());
  job.segments.push_back(std::move(of));
  job.sources.push_back(source);
  return static_cast<int>(job.sources.size()) - 1;
}

// A tensor of [rows, 4] bf16 at `offset`, read by the ranks.
inline int add_tensor(WriteJob& job, int source, const std::vector<int>& ranks, uint64_t offset = 0, int64_t rows = 4) {
  Tensor tensor;
  tensor.source = source;
  tensor.offset = offset;
  tensor.rows = rows;
  tensor.cols = 4;
  tensor.row_bytes = 8;
  tensor.col_bytes = 2;
  const int index = static_cast<int>(job.tensors.size());
  job.tensors.push_back(tensor);
  for (const int rank : ranks) {
    Rect rect;
    rect.tensor = index;
    rect.rank = rank;
    rect.param = index;
    rect.rows = rows;
    rect.cols = 4;
    job.rects.push_back(rect);
  }
  return index;
}

inline WriteJob plain_job(int segments, const std::vector<int>& ranks) {
  WriteJob job;
  for (int s = 0; s < segments; s++) add_tensor(job, add_source(job, segment(s, {s % 3})), ranks);
  return job;
}

struct Ran {
  std::string error;
  int tensor = -1;
  std::vector<std::vector<size_t>> rects;    // rectangles that each rank got, in order
  std::vector<std::vector<size_t>> batches;  // number of segments in each batch
  uint64_t opened = 0, closed = 0;
  std::string warning;
};

// Runs a session as GpuStore does. The scatter is replaced by a record of the rectangles.
inline Ran run(ipc::Mappings& mappings, CountingDriver& driver, const WriteJob& job,
               const ipc::SessionLimits& limits = {}) {
  Ran out;
  out.rects.resize(static_cast<size_t>(driver.ranks()));
  out.batches.resize(static_cast<size_t>(driver.ranks()));
  std::mutex mutex;
  ipc::Session session(
      mappings, job,
      [&](int tensor, std::string message) {
        const std::lock_guard lock(mutex);
        if (!out.error.empty()) return;
        out.error = std::move(message);
        out.tensor = tensor;
      },
      limits);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < driver.ranks(); rank++) {
    ranks.emplace_back([&, rank] {
      if (session.empty()) return;
      session.prepare(rank);
      if (!session.begin()) return;
      size_t first = 0, last = 0;
      while (session.next(rank, first, last)) {
        CHECK(first < last && driver.all_done());
        out.batches[rank].push_back(last - first);
        for (size_t i = first; i < last; i++) {
          const auto& open = session.segments(rank)[i];
          CHECK(open.mapping.base != 0);
          out.rects[rank].insert(out.rects[rank].end(), open.plan.rects.begin(), open.plan.rects.end());
        }
      }
    });
  }
  session.open();
  for (std::thread& thread : ranks) thread.join();
  session.close(!out.error.empty());
  out.opened = session.opened();
  out.closed = session.closed();
  out.warning = session.warning();
  return out;
}

inline size_t given(const Ran& ran) {
  size_t sum = 0;
  for (const auto& rects : ran.rects) sum += rects.size();
  return sum;
}

inline std::set<size_t> rects_of(const WriteJob& job, int rank) {
  std::set<size_t> out;
  for (size_t i = 0; i < job.rects.size(); i++) {
    if (job.rects[i].rank == rank) out.insert(i);
  }
  return out;
}

}  // namespace refit::test::ipc_world
