// Memory of other processes in a write: what is opened, in which order, what waits for what, and that all of it is
// closed whatever fails. The driver here counts, and refuses what no driver may be asked.
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
#include "transport/ipc/ipc_session.h"
#include "transport/ipc/ipc_words.h"

using namespace refit;
using ipc::Cause;
using ipc::Mapping;
using ipc::Refused;

namespace {

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

  // Of the events that are open; those of a write that failed were closed without a wait.
  bool all_done() {
    const std::lock_guard lock(mutex_);
    return std::all_of(events_.begin(), events_.end(), [](const auto& event) { return event.second.done; });
  }
  size_t live() const { return live_.size(); }
  size_t live_events() const { return events_.size(); }

  bool slow = false;  // openings end in any order
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

Segment segment(int name, std::vector<int> events = {}, std::string keep = "") {
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

int add_source(WriteJob& job, Segment of) {
  Source source;
  source.segment = static_cast<int>(job.segments.size());
  job.segments.push_back(std::move(of));
  job.sources.push_back(source);
  return static_cast<int>(job.sources.size()) - 1;
}

// A tensor of [rows, 4] bf16 at `offset`, read by the ranks.
int add_tensor(WriteJob& job, int source, const std::vector<int>& ranks, uint64_t offset = 0, int64_t rows = 4) {
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

WriteJob plain_job(int segments, const std::vector<int>& ranks) {
  WriteJob job;
  for (int s = 0; s < segments; s++) add_tensor(job, add_source(job, segment(s, {s % 3})), ranks);
  return job;
}

struct Ran {
  std::string error;
  int tensor = -1;
  std::vector<std::vector<size_t>> rects;    // that each rank was given, in order
  std::vector<std::vector<size_t>> batches;  // segments of each
  uint64_t opened = 0, closed = 0;
  std::string warning;
};

// As GpuStore runs it; what is given is the scatter.
Ran run(ipc::Mappings& mappings, CountingDriver& driver, const WriteJob& job, const ipc::SessionLimits& limits = {}) {
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

size_t given(const Ran& ran) {
  size_t sum = 0;
  for (const auto& rects : ran.rects) sum += rects.size();
  return sum;
}

std::set<size_t> rects_of(const WriteJob& job, int rank) {
  std::set<size_t> out;
  for (size_t i = 0; i < job.rects.size(); i++) {
    if (job.rects[i].rank == rank) out.insert(i);
  }
  return out;
}

void the_plan_opens_each_memory_once_on_the_ranks_that_read_it() {
  WriteJob job;
  const int a = add_source(job, segment(1, {7, 8}));
  const int b = add_source(job, segment(2, {8, 9}));
  const int again = add_source(job, segment(1, {10}, "name"));
  const int unread = add_source(job, segment(3, {11}));
  const int empty = add_source(job, segment(4, {12}));
  add_tensor(job, b, {1});
  add_tensor(job, a, {0, 1}, 8);
  add_tensor(job, again, {0}, 64, 6);
  add_tensor(job, empty, {0}, 0, 0);
  (void)unread;
  const ipc::IpcPlan plan = ipc::plan_segments(job, 3);
  CHECK(plan.ranks.size() == 3 && plan.ranks[0].size() == 1 && plan.ranks[1].size() == 2 && plan.ranks[2].empty());
  const ipc::PlannedSegment& first = plan.ranks[0][0];
  CHECK(first.segment == 0 && first.tensor == 1 && first.keep == "name");
  CHECK((first.rects == std::vector<size_t>{1, 3}));
  CHECK((first.ends == std::vector<std::pair<int, uint64_t>>{{1, 8 + 32}, {2, 64 + 48}}));
  CHECK(first.bytes == 32 + 48);
  CHECK(plan.ranks[1][0].segment == 1 && plan.ranks[1][1].segment == 0);
  std::vector<int> events;
  for (const auto& event : plan.events) events.push_back(event.handle[0]);
  CHECK((events == std::vector<int>{8, 9, 7, 10}));
  CHECK(plan.events[0].rank == 1 && plan.events[3].rank == 0 && plan.events[3].tensor == 2);
}

void bounds_of_segments_are_checked_before_anything() {
  const std::vector<Param> params(3, {"p", 8, 4});
  const auto refused = [&](const WriteJob& job, const char* text) {
    try {
      check_write(job, 1, params);
      CHECKF(false, "%s", text);
    } catch (const std::invalid_argument& e) {
      CHECKF(std::string(e.what()).find(text) != std::string::npos, "%s", e.what());
    }
  };
  const auto with = [](auto change) {
    WriteJob job;
    Segment one = segment(1);
    change(one);
    add_tensor(job, add_source(job, one), {0});
    return job;
  };
  check_write(with([](Segment&) {}), 1, params);
  refused(with([](Segment& s) { s.handle.pop_back(); }), "segment 0: the handle has 63 bytes, expected 64");
  refused(with([](Segment& s) { s.handle.clear(); }), "expected a handle, descriptors of blocks, or fabric handles");
  refused(with([](Segment& s) { s.fds = {1}; }), "expected a handle, descriptors");
  refused(with([](Segment& s) { s.events.resize(65); }), "event handles have 65 bytes");
  const auto blocks = [&](uint64_t bytes, size_t count) {
    return with([&](Segment& s) {
      s.handle.clear();
      s.block_bytes = bytes;
      s.fds.assign(count, 1);
    });
  };
  check_write(blocks(4096, 3), 1, params);
  refused(blocks(0, 3), "3 blocks of 0 bytes");
  refused(blocks(uint64_t{1} << 62, 3), "3 blocks of");
  refused(with([](Segment& s) {
            s.handle.clear();
            s.block_bytes = 1;
            s.fabric.resize(65);
          }),
          "fabric handles have 65 bytes");
  WriteJob job = plain_job(1, {0});
  job.sources[0].segment = 1;
  refused(job, "source 0: segment 1 does not exist, there are 1");
}

// Else every write of files would wait for ever: no rank begins.
void a_write_without_segments_waits_for_nobody() {
  Pool pool(3);
  CountingDriver driver(2);
  ipc::Mappings mappings(driver, pool);
  const Ran ran = run(mappings, driver, plain_job(0, {}));
  CHECK(ran.error.empty() && ran.opened == 0 && ran.closed == 0 && ran.warning.empty());
}

void few_segments_are_all_open_before_the_first_is_read() {
  Pool pool(3);
  for (int fail = -1; fail <= 6; fail++) {
    CountingDriver driver(2);
    driver.slow = true;
    driver.fail_open = fail;
    ipc::Mappings mappings(driver, pool);
    const WriteJob job = plain_job(3, {0, 1});
    ipc::SessionLimits limits;
    limits.batch_bytes = 1;
    const Ran ran = run(mappings, driver, job, limits);
    if (fail <= 0) {
      CHECK(ran.error.empty() && ran.opened == 6 && ran.closed == 6);
      for (int rank = 0; rank < 2; rank++) {
        CHECK((ran.batches[rank] == std::vector<size_t>{3}));
        CHECK((std::set<size_t>(ran.rects[rank].begin(), ran.rects[rank].end()) == rects_of(job, rank)));
      }
      CHECK(driver.done == 3 && driver.event_opens == 3);
    } else {
      CHECKF(given(ran) == 0, "open %d failed, %zu rectangles were given", fail, given(ran));
      CHECK(ran.error.find("no such handle: the sender has freed it") != std::string::npos && ran.tensor >= 0);
      CHECK(ran.opened == ran.closed && ran.opened < 6);
    }
    CHECK(driver.live() == 0 && driver.live_events() == 0);
  }
}

void many_segments_are_read_in_order_while_others_open() {
  Pool pool(4);
  ipc::SessionLimits limits;
  limits.few = 5;
  limits.batch_bytes = 32 * 8;
  for (const int ranks : {1, 2}) {
    CountingDriver driver(ranks);
    driver.slow = true;
    ipc::Mappings mappings(driver, pool);
    const WriteJob job = plain_job(100, ranks == 1 ? std::vector<int>{0} : std::vector<int>{0, 1});
    const Ran ran = run(mappings, driver, job, limits);
    const auto opens = static_cast<uint64_t>(100 * ranks);
    CHECK(ran.error.empty() && ran.opened == opens && ran.closed == opens && driver.live() == 0);
    for (int rank = 0; rank < ranks; rank++) {
      const std::set<size_t> all = rects_of(job, rank);
      CHECK(std::equal(ran.rects[rank].begin(), ran.rects[rank].end(), all.begin(), all.end()));
      if (ranks > 1) {
        CHECK((ran.batches[rank] == std::vector<size_t>{100}));
        continue;
      }
      // One at first, then 8, then half of what is left.
      std::vector<size_t> wanted{1};
      for (size_t left = 99; left > 0; left -= wanted.back()) wanted.push_back(std::min<size_t>(8, (left + 1) / 2));
      CHECK(ran.batches[rank] == wanted);
    }
  }
}

void whatever_opening_fails_all_is_closed() {
  Pool pool(4);
  ipc::SessionLimits limits;
  limits.few = 2;
  limits.batch_bytes = 64;
  for (int fail = 1; fail <= 40; fail++) {
    CountingDriver driver(2);
    driver.slow = true;
    driver.fail_open = fail;
    ipc::Mappings mappings(driver, pool);
    const Ran ran = run(mappings, driver, plain_job(20, {0, 1}), limits);
    CHECK(!ran.error.empty() && ran.tensor >= 0 && ran.tensor < 20);
    CHECKF(ran.opened == ran.closed && driver.live() == 0 && driver.live_events() == 0, "open %d", fail);
    CHECK(mappings.kept() == 0);
  }
}

void an_event_that_cannot_be_opened_changes_nothing() {
  Pool pool(4);
  ipc::SessionLimits limits;
  limits.few = 2;
  limits.batch_bytes = 1;
  for (int fail = 1; fail <= 3; fail++) {
    CountingDriver driver(2);
    driver.fail_event = fail;
    ipc::Mappings mappings(driver, pool);
    const Ran ran = run(mappings, driver, plain_job(20, {0, 1}), limits);
    CHECK(given(ran) == 0 && ran.tensor >= 0);
    CHECK(ran.error.find("event that its sender recorded cannot be waited for: no such event") != std::string::npos);
    CHECK(ran.opened == ran.closed && driver.live() == 0 && driver.live_events() == 0);
  }
}

void nothing_is_read_before_every_event_is_done() {
  Pool pool(2);
  CountingDriver driver(2);
  driver.looks_until_done = 40;
  ipc::Mappings mappings(driver, pool);
  WriteJob job = plain_job(3, {0, 1});
  const Ran ran = run(mappings, driver, job);
  CHECK(ran.error.empty() && driver.looks > 40 && driver.done == 3);

  driver.looks_until_done = -1;
  job.event_timeout_ms = 20;
  const Ran late = run(mappings, driver, job);
  CHECK(given(late) == 0 && late.error.find("was not done after 20 ms") != std::string::npos && late.tensor == 0);
  CHECK(late.opened == late.closed && driver.live_events() == 0);

  std::atomic<bool> cancel = false;
  job.cancel = &cancel;
  job.event_timeout_ms = 60000;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    cancel = true;
  });
  const Ran stopped = run(mappings, driver, job);
  other.join();
  CHECK(stopped.error == "the write was cancelled" && given(stopped) == 0 && stopped.opened == stopped.closed);
}

void a_tensor_that_leaves_its_segment_is_named() {
  Pool pool(2);
  CountingDriver driver(1);
  ipc::Mappings mappings(driver, pool);
  for (const bool keep : {false, true}) {
    WriteJob job;
    const int source = add_source(job, segment(1, {}, keep ? "kept" : ""));
    add_tensor(job, source, {0}, kSegmentBytes - 32);
    CHECK(run(mappings, driver, job).error.empty());
    add_tensor(job, source, {0}, kSegmentBytes - 31);
    const Ran ran = run(mappings, driver, job);
    CHECK(given(ran) == 0 && ran.tensor == 1);
    CHECK(ran.error.find("ends at byte 4097 of its CUDA memory, which has 4096") != std::string::npos);
  }
  CHECK(mappings.kept() == 1 && mappings.close_all() == 1 && driver.live() == 0);
}

void kept_mappings_are_found_again_until_they_are_closed() {
  Pool pool(2);
  CountingDriver driver(2);
  {
    ipc::Mappings mappings(driver, pool);
    WriteJob job;
    add_tensor(job, add_source(job, segment(1, {}, "a")), {0, 1});
    add_tensor(job, add_source(job, segment(2, {}, "b")), {0});
    add_tensor(job, add_source(job, segment(3)), {1});
    Ran ran = run(mappings, driver, job);
    CHECK(ran.opened == 4 && ran.closed == 1 && mappings.kept() == 3);
    ran = run(mappings, driver, job);
    CHECK(ran.opened == 1 && ran.closed == 1 && given(ran) == 4 && mappings.kept() == 3);
    CHECK(mappings.close("c") == 0 && mappings.close("a") == 2 && mappings.kept() == 1);
    ran = run(mappings, driver, job);
    CHECK(ran.opened == 3 && ran.closed == 1);
    // A failed write closes what it opened itself and leaves what was kept before.
    job.segments[0].handle[0] = 9;
    driver.fail_open = driver.opens + 2;
    ran = run(mappings, driver, job);
    CHECK(!ran.error.empty() && ran.opened == ran.closed && mappings.kept() == 3);
    // It goes under the last name, and a write without one uses it and leaves it.
    job.segments[0] = segment(1, {}, "z");
    driver.fail_open = -1;
    CHECK(run(mappings, driver, job).opened == 1);
    job.segments[0].keep.clear();
    CHECK(run(mappings, driver, job).opened == 1);
    CHECK(mappings.close("a") == 0 && mappings.close("z") == 2 && mappings.kept() == 1 && driver.live() == 1);
  }
  CHECK(driver.live() == 0);
}

void blocks_are_known_by_the_files_behind_their_descriptors() {
  Pool pool(1);
  CountingDriver driver(1);
  ipc::Mappings mappings(driver, pool);
  const int first = memfd_create("a", MFD_CLOEXEC), second = memfd_create("b", MFD_CLOEXEC);
  const auto job_of = [](int fd) {
    WriteJob job;
    Segment blocks;
    blocks.block_bytes = 4096;
    blocks.fds = {fd};
    blocks.keep = "pool";
    add_tensor(job, add_source(job, blocks), {0}, 4096 - 32);
    return job;
  };
  CHECK(run(mappings, driver, job_of(first)).opened == 1);
  if (mappings.kept() == 0) {
    std::printf("ipc: this system does not compare descriptors (kcmp): blocks are not kept\n");
    close(first);
    close(second);
    return;
  }
  const int number = dup(first);
  CHECK(run(mappings, driver, job_of(number)).opened == 0);
  CHECK(run(mappings, driver, job_of(second)).opened == 1);
  // The same number, another file.
  CHECK(dup2(second, number) == number);
  close(second);
  CHECK(run(mappings, driver, job_of(number)).opened == 0);
  close(number);
  const int reused = memfd_create("c", MFD_CLOEXEC);
  CHECK(run(mappings, driver, job_of(reused)).opened == 1);
  CHECK(mappings.kept() == 3 && mappings.close("pool") == 3);
  close(first);
  close(reused);
}

void a_close_that_fails_is_made_up_for() {
  Pool pool(2);
  for (int fail = 1; fail <= 4; fail++) {
    CountingDriver driver(2);
    driver.fail_close = fail;
    ipc::Mappings mappings(driver, pool);
    const WriteJob job = plain_job(2, {0, 1});
    Ran ran = run(mappings, driver, job);
    CHECK(ran.error.empty() && ran.opened == 4 && ran.closed == 3 && driver.live() == 1);
    CHECK(ran.warning.find("cannot close") != std::string::npos);
    ran = run(mappings, driver, job);
    CHECK(ran.warning.empty() && ran.opened == 4 && ran.closed == 5 && driver.live() == 0);
  }
}

#ifdef REFIT_FAULTS
void armed_faults_are_met_at_every_pass() {
  Pool pool(3);
  using fault::Point;
  for (const Point point : {Point::kIpcOpen, Point::kIpcEvent, Point::kIpcClose}) {
    const int passes = point == Point::kIpcEvent ? 3 : 8;
    for (int at = 1; at <= passes; at++) {
      CountingDriver driver(2);
      ipc::Mappings mappings(driver, pool);
      const WriteJob job = plain_job(4, {0, 1});
      fault::arm(point, at, fault::Action::kFail, 0);
      const Ran ran = run(mappings, driver, job);
      if (point == Point::kIpcClose) {
        CHECK(ran.error.empty() && ran.closed == 7 && !ran.warning.empty());
      } else {
        CHECK(given(ran) == 0 && ran.error.find("injected fault") != std::string::npos);
        CHECK(ran.opened == ran.closed);
      }
      fault::disarm();
      const Ran after = run(mappings, driver, job);
      CHECK(after.error.empty() && given(after) == 8);
      CHECK(driver.live() == 0 && driver.live_events() == 0);
    }
  }
}
#endif

// Any job, any limits, any failure: what a rank is given is a prefix of its plan, and in the end nothing is open.
void nothing_is_left_open_whatever_happens() {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Pool pool(3);
  for (int round = 0; round < 150; round++) {
    CountingDriver driver(1 + below(3));
    driver.slow = below(2) == 0;
    uint64_t opened = 0, closed = 0;
    {
      ipc::Mappings mappings(driver, pool);
      for (int write = 0; write < 3; write++) {
        WriteJob job;
        const int segments = 1 + below(12);
        for (int s = 0; s < segments; s++) {
          const int source = add_source(job, segment(below(8), {below(5)}, below(3) == 0 ? "kept" : ""));
          for (int n = below(3); n >= 0; n--) {
            std::vector<int> ranks;
            for (int r = 0; r < driver.ranks(); r++) {
              if (below(3) > 0) ranks.push_back(r);
            }
            add_tensor(job, source, ranks, static_cast<uint64_t>(below(4120)), 1);
          }
        }
        ipc::SessionLimits limits;
        limits.few = static_cast<size_t>(below(8));
        limits.batch_bytes = static_cast<uint64_t>(below(200));
        if (below(2) == 0) driver.fail_open = driver.opens + 1 + below(10);
        if (below(4) == 0) driver.fail_event = driver.event_opens + 1 + below(4);
        if (below(4) == 0) driver.fail_close = driver.closes + 1 + below(6);
        const ipc::IpcPlan plan = ipc::plan_segments(job, driver.ranks());
        const Ran ran = run(mappings, driver, job, limits);
        opened += ran.opened;
        closed += ran.closed;
        for (int rank = 0; rank < driver.ranks(); rank++) {
          std::vector<size_t> all;
          for (const auto& planned : plan.ranks[rank])
            all.insert(all.end(), planned.rects.begin(), planned.rects.end());
          CHECK(ran.rects[rank].size() <= all.size());
          CHECK(std::equal(ran.rects[rank].begin(), ran.rects[rank].end(), all.begin()));
          if (ran.error.empty()) CHECK(ran.rects[rank] == all);
        }
        CHECK(driver.live_events() == 0);
        driver.fail_open = driver.fail_event = -1;
      }
      driver.fail_close = -1;
      CHECK(driver.live() == opened - closed);
      closed += mappings.close_all();
      CHECKF(opened == closed, "round %d: %lu opened, %lu closed", round, opened, closed);
    }
    CHECK(driver.live() == 0);
  }
}

void a_cpu_refuses_memory_of_gpus() {
  CoreConfig config;
  config.params = {{"p0", 4, 4}, {"p1", 4, 4}};
  Store store(config);
  Pool pool(1);
  WriteJob job;
  std::vector<uint8_t> bytes(32, 1);
  Source memory;
  memory.data = bytes.data();
  memory.bytes = bytes.size();
  job.sources.push_back(memory);
  add_tensor(job, 0, {0});
  add_tensor(job, add_source(job, segment(1)), {0});
  check_write(job, 1, config.params);
  const WriteOutcome out = store.write(job, pool);
  CHECK(out.error.find("this engine runs on the CPU") != std::string::npos && out.error_tensor == 1);
  CHECK(out.states == std::vector<uint8_t>(2, 0) && out.segments_opened == 0);
  CHECK(*static_cast<const uint8_t*>(store.param(0, 0)) == 0);
}

void descriptors_of_another_process_are_taken_or_refused_in_words() {
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    const int fd = memfd_create("theirs", MFD_CLOEXEC);
    if (write(fd, "theirs", 6) == 6 && write(pipes[1], &fd, sizeof fd) == sizeof fd) pause();
    _exit(0);
  }
  int fd = -1;
  CHECK(read(pipes[0], &fd, sizeof fd) == sizeof fd);
  const auto refused = [](int pid, int number) {
    try {
      close(ipc::take_descriptor(pid, number));
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  try {
    const int own = ipc::take_descriptor(child, fd);
    char text[7] = {};
    CHECK(pread(own, text, 6, 0) == 6 && std::strcmp(text, "theirs") == 0);
    close(own);
    CHECK(refused(child, 999).find("Bad file descriptor: the process has no descriptor 999") != std::string::npos);
  } catch (const std::runtime_error& e) {
    std::printf("ipc: %s\n", e.what());  // a sandbox without ptrace
    CHECK(std::string(e.what()).find("expandable_segments:False") != std::string::npos);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(refused(child, fd).find("the sender has ended") != std::string::npos);
  close(pipes[0]);
  close(pipes[1]);
}

void every_refusal_has_a_cure() {
  const Segment of = segment(1);
  std::set<std::string> texts;
  for (const Cause cause : {Cause::kUnknown, Cause::kGone, Cause::kSameProcess, Cause::kNotVisible, Cause::kNoPeer,
                            Cause::kNoMemory, Cause::kNotSupported}) {
    const std::string text = ipc::cannot_open(Refused(cause, "code"), of);
    CHECKF(text.find("cannot be opened: code: ") != std::string::npos && text.size() > 70, "%s", text.c_str());
    texts.insert(text);
  }
  CHECK(texts.size() == 7);
}

}  // namespace

int main() {
  the_plan_opens_each_memory_once_on_the_ranks_that_read_it();
  bounds_of_segments_are_checked_before_anything();
  a_write_without_segments_waits_for_nobody();
  few_segments_are_all_open_before_the_first_is_read();
  many_segments_are_read_in_order_while_others_open();
  whatever_opening_fails_all_is_closed();
  an_event_that_cannot_be_opened_changes_nothing();
  nothing_is_read_before_every_event_is_done();
  a_tensor_that_leaves_its_segment_is_named();
  kept_mappings_are_found_again_until_they_are_closed();
  blocks_are_known_by_the_files_behind_their_descriptors();
  a_close_that_fails_is_made_up_for();
#ifdef REFIT_FAULTS
  armed_faults_are_met_at_every_pass();
#endif
  nothing_is_left_open_whatever_happens();
  a_cpu_refuses_memory_of_gpus();
  descriptors_of_another_process_are_taken_or_refused_in_words();
  every_refusal_has_a_cure();
  return refit::test::finish("ipc");
}
