// Memory of other processes in a write: what is opened, in which order, and which step waits for which.
#include "test/ipc_common.h"

using namespace refit;
using namespace refit::test::ipc_world;

namespace {

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

// Otherwise every write from files would wait for ever, because no rank would begin.
void a_write_without_segments_does_not_wait() {
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
      // One segment at first, then 8, then half of the rest.
      std::vector<size_t> wanted{1};
      for (size_t left = 99; left > 0; left -= wanted.back()) wanted.push_back(std::min<size_t>(8, (left + 1) / 2));
      CHECK(ran.batches[rank] == wanted);
    }
  }
}

void everything_is_closed_whichever_open_fails() {
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

void a_tensor_that_ends_past_its_segment_is_named() {
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

}  // namespace

int main() {
  the_plan_opens_each_memory_once_on_the_ranks_that_read_it();
  bounds_of_segments_are_checked_before_anything();
  a_write_without_segments_does_not_wait();
  few_segments_are_all_open_before_the_first_is_read();
  many_segments_are_read_in_order_while_others_open();
  everything_is_closed_whichever_open_fails();
  an_event_that_cannot_be_opened_changes_nothing();
  nothing_is_read_before_every_event_is_done();
  a_tensor_that_ends_past_its_segment_is_named();
  return refit::test::finish("ipc");
}
