// The segments of one write, from opening to closing.
//
// Each rank's thread opens its own segments, in the order in which it reads them, and launches the reads in between:
// the GPU copies while the next segments are opened. (If other threads opened segments at the same time, they would
// keep the rank out of the driver's lock, and its launches would come after the last of them.) With few segments, or
// with several ranks, nothing is scattered before all ranks have opened and checked all segments. A refused handle then
// changes nothing.
//
// Threads: `open` runs on the write's thread, `begin` and `next` run on the ranks' threads, all at the same time.
// `close` is called when all of these have returned and the GPUs have finished their work, because closing waits for a
// busy GPU. Only the write's thread uses the senders' events, in the context of one rank.
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
  size_t few = 8;                  // up to this many segments to open on a rank, the scatter waits for all
  uint64_t batch_bytes = 1 << 30;  // otherwise it waits for this many bytes: few large launches
};

class Session {
 public:
  // Called for the first failure, with a tensor of the job and the reason.
  using Fail = std::function<void(int tensor, std::string message)>;

  // Makes the whole plan. The job and the mappings must outlive this object.
  Session(Mappings& mappings, const WriteJob& job, Fail fail, const SessionLimits& limits = {});
  // Closes everything, as after a failed write, unless `close` has been called.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  bool empty() const;
  // Opens the events, waits until the senders' work before them is done, and destroys them. Never throws.
  void open();
  // Opens the first segments that the rank reads.
  void prepare(int rank) { open_some(rank); }
  // Returns when the senders' work is done. Returns false if the write has failed.
  bool begin();
  // Opens the next segments that the rank reads, [first, last) of segments(rank). Returns false if there are no more or
  // the write has failed.
  bool next(int rank, size_t& first, size_t& last);
  // Ends the session: `begin`, `next` and `open` stop waiting.
  void stop();
  // Closes what this write opened, except segments that are to be kept. A failed write keeps nothing.
  void close(bool failed);
  // Closes nothing: the GPU is lost and the process is about to end.
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
  // Only the rank's own thread uses it, until `close`.
  struct RankState {
    std::vector<Opened> segments;
    size_t given = 0;      // segments that `next` has returned
    size_t open = 0;       // segments that are open: [0, open)
    uint64_t waiting = 0;  // bytes of [given, open)
    uint64_t left = 0;     // bytes of the segments from `open` on
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
  size_t ready_ = 0;  // ranks that have opened all their segments
};

}  // namespace refit::ipc
