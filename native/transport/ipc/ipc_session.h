// The segments of one write, from opening to closing.
//
// Each rank's thread opens its own, in the order in which it reads them, and launches what reads them in between: the
// card copies while the next are opened. (Other threads that open meanwhile keep a rank out of the driver's lock: its
// launches then come after the last of them.) With few segments, or several ranks, nothing is scattered before all
// ranks have opened and checked all, so that a refused handle changes nothing.
//
// Threads: `open` on the write's thread, `begin` and `next` on the ranks', all at the same time; `close` when all of
// those have returned and the cards have passed everything: closing waits for what a card is doing. A sender's events
// are the write's thread's alone, in the context of one rank.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "transport/ipc/ipc_mappings.h"
#include "transport/ipc/ipc_plan.h"

namespace refit::ipc {

struct SessionLimits {
  size_t few = 8;                  // segments to open on one rank, up to which the scatter waits for all
  uint64_t batch_bytes = 1 << 30;  // else it waits for this much: few launches, each large
};

class Session {
 public:
  // Told of the first failure: a tensor of the job, and why.
  using Fail = std::function<void(int tensor, std::string message)>;

  // Plans all of it. The job outlives it, and so do the mappings.
  Session(Mappings& mappings, const WriteJob& job, Fail fail, const SessionLimits& limits = {});
  // Closes what `close` was not called for.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  bool empty() const;
  // Opens the events, waits until what the senders recorded them behind is done, and destroys them. Never throws.
  void open();
  // Opens the first segments that the rank is to read.
  void prepare(int rank) { open_some(rank); }
  // Returns when the senders' work is done; false: the write has failed.
  bool begin();
  // Opens the next segments that the rank is to read, [first, last) of segments(rank). False: there are no more, or the
  // write has failed.
  bool next(int rank, size_t& first, size_t& last);
  // Ends it: nobody waits here any longer.
  void stop();
  // Closes what was opened but for what is to be kept, which a failed write keeps nothing of.
  void close(bool failed);
  // The card is lost, and the process about to end: nothing is closed.
  void abandon() { done_ = true; }

  struct Opened {
    PlannedSegment plan;
    Mapping mapping;
    bool ours = false;  // opened by this write
  };
  const std::vector<Opened>& segments(int rank) const { return ranks_[static_cast<size_t>(rank)].segments; }
  uint64_t opened() const { return opened_; }
  uint64_t closed() const { return closed_; }
  const std::string& warning() const { return warning_; }

 private:
  // Its rank's thread's alone, until `close`.
  struct RankState {
    std::vector<Opened> segments;
    size_t given = 0;      // to the rank
    size_t open = 0;       // the first so many are
    uint64_t waiting = 0;  // bytes of [given, open)
    uint64_t left = 0;     // bytes behind `open`
  };
  struct Event {
    PlannedEvent plan;
    uint64_t id = 0;
    bool open = false;
  };
  bool cancelled() const { return job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed); }
  void open_event(Event& event);
  void await_event(const Event& event);
  void open_segment(int rank, Opened& segment);
  void open_some(int rank);
  void destroy_events();
  void fail(int tensor, const std::string& message);

  Mappings& mappings_;
  const WriteJob& job_;
  const Fail fail_;
  const SessionLimits limits_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<RankState> ranks_;
  std::vector<Event> events_;
  bool wait_for_all_ = true;
  std::atomic<uint64_t> opened_ = 0;
  uint64_t closed_ = 0;
  std::string warning_;
  bool done_ = false;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopped_ = false;
  bool events_done_ = false;
  size_t ready_ = 0;  // ranks that have opened all of theirs
};

}  // namespace refit::ipc
