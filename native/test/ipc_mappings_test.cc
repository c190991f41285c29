// Mappings of other processes' memory: they are kept, found again, refused with advice, and closed after every failure.
#include "test/ipc_common.h"

using namespace refit;
using namespace refit::test::ipc_world;

namespace {

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
    // The last name is kept. A write without a name uses the mapping and does not close it.
    job.segments[0] = segment(1, {}, "z");
    driver.fail_open = -1;
    CHECK(run(mappings, driver, job).opened == 1);
    job.segments[0].keep.clear();
    CHECK(run(mappings, driver, job).opened == 1);
    CHECK(mappings.close("a") == 0 && mappings.close("z") == 2 && mappings.kept() == 1 && driver.live() == 1);
  }
  CHECK(driver.live() == 0);
}

void blocks_are_identified_by_the_files_of_their_descriptors() {
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
  // The same number with another file.
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

void a_failed_close_is_repeated_with_the_next_write() {
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
void armed_faults_fail_at_every_pass() {
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

// With any job, any limits and any failure, a rank gets a prefix of its plan, and in the end nothing is open.
void nothing_is_left_open_after_any_failure() {
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

void descriptors_of_another_process_are_taken_or_refused_with_a_reason() {
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
    std::printf("ipc: %s\n", e.what());  // in a sandbox without ptrace
    CHECK(std::string(e.what()).find("expandable_segments:False") != std::string::npos);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(refused(child, fd).find("the sender has ended") != std::string::npos);
  close(pipes[0]);
  close(pipes[1]);
}

void every_refusal_names_a_remedy() {
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
  kept_mappings_are_found_again_until_they_are_closed();
  blocks_are_identified_by_the_files_of_their_descriptors();
  a_failed_close_is_repeated_with_the_next_write();
#ifdef REFIT_FAULTS
  armed_faults_fail_at_every_pass();
#endif
  nothing_is_left_open_after_any_failure();
  a_cpu_refuses_memory_of_gpus();
  descriptors_of_another_process_are_taken_or_refused_with_a_reason();
  every_refusal_names_a_remedy();
  return refit::test::finish("ipc_mappings");
}
