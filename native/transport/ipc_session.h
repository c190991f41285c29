// The segments of one write, from opening to closing.
//
// Threads open segments in the order in which the ranks read them, while the ranks scatter what is open already. With
// few segments nothing is scattered before all are open and checked, so that a refused handle changes nothing.
//
// Threads: `open` on the write's thread (it brings the pool's), `begin` and `next` on the ranks', all at the same time;
// `close` when all of those have returned and the cards have passed everything.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "transport/ipc_mappings.h"
#include "transport/ipc_plan.h"

namespace refit::ipc {

struct SessionLimits {
  size_t few = 32;                   // segments to open on a rank, up to which the scatter waits for all
  uint64_t batch_bytes = 256 << 20;  // else it waits for this much: few launches, each large
  int64_t openers = 8;               // threads
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
  // Opens events and segments; returns when all are open or the write has failed. Never throws.
  void open();
  // Returns when the senders' work is done and the rank's stream waits for its events; false: the write has failed.
  bool begin(int rank);
  // The next segments that the rank is to read, [first, last) of segments(rank). Waits until some are open. False:
  // there are no more, or the write has failed.
  bool next(int rank, size_t& first, size_t& last);
  // Destroys the events once all ranks have begun: while they scatter. On the write's thread, after `open`.
  void close_events();
  // Ends it: nobody waits here any longer.
  void stop();
  // Closes what was opened but for what is to be kept, which a failed write keeps nothing of.
  void close(bool failed);
  // The card is lost, and the process about to end: nothing is closed.
  void abandon() { done_ = true; }

  struct Opened {
    PlannedSegment plan;
    Mapping mapping;
    bool ready = false;  // under the mutex
    bool ours = false;   // opened by this write
  };
  const std::vector<Opened>& segments(int rank) const { return ranks_[static_cast<size_t>(rank)].segments; }
  uint64_t opened() const { return opened_; }
  uint64_t closed() const { return closed_; }
  const std::string& warning() const { return warning_; }

 private:
  struct RankState {
    std::vector<Opened> segments;
    size_t given = 0;      // to the rank
    size_t prefix = 0;     // of the segments, all open
    uint64_t waiting = 0;  // bytes of [given, prefix)
  };
  struct Event {
    PlannedEvent plan;
    uint64_t id = 0;
    bool open = false;
  };
  struct Task {
    int rank = -1;  // -1: an event
    size_t index = 0;
  };

  bool cancelled() const { return job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed); }
  void run(const Task& task);
  void open_event(Event& event);
  void open_segment(int rank, Opened& segment);
  bool ready(RankState& rank) const;
  void destroy_events();
  void fail(int tensor, const std::string& message);

  Mappings& mappings_;
  const WriteJob& job_;
  const Fail fail_;
  const SessionLimits limits_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<RankState> ranks_;
  std::vector<Event> events_;
  std::vector<Task> tasks_;
  bool wait_for_all_ = true;
  std::atomic<size_t> next_task_ = 0;
  std::atomic<uint64_t> opened_ = 0;
  uint64_t closed_ = 0;
  std::string warning_;
  bool done_ = false;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopped_ = false;
  size_t tasks_left_ = 0;
  size_t events_left_ = 0;
  size_t begun_ = 0;  // ranks
};

}  // namespace refit::ipc
