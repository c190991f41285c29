// Weights from another process's memory on the GPUs: ordinary segments, expandable ones, events, kept mappings, and
// errors. The other process is this program again (ipc_sender.cuh).
//   ipc_test [--quick]
//   ipc_test --bench [--gb 16]    what opening, closing and events cost, and the rate of whole writes
//
// The executor and the sessions are compiled again here with their fault points, so the library's are not linked.
#define REFIT_FAULTS
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "core/fault.cc"
#include "core/write/write_check.h"
#include "cuda/device/uuid.h"
#include "cuda/exchange/peers.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/write.h"
#include "cuda/weights/write_run.cc"
#include "test/check.h"
#include "transport/ipc/ipc_descriptor.h"
#include "transport/ipc/ipc_mappings.cc"
#include "transport/ipc/ipc_session.cc"
// After the executor, which gets its fault points from above.
#include "test/gpu/ipc/ipc_bench.cuh"

namespace {

bool all(const WriteOutcome& outcome, TensorState state) {
  return std::all_of(outcome.states.begin(), outcome.states.end(),
                     [&](uint8_t s) { return s == static_cast<uint8_t>(state); });
}

void expect_written(World& world, const WriteOutcome& outcome, uint64_t seed, const char* what) {
  CHECKF(outcome.error.empty(), "%s: tensor %d: %s", what, outcome.error_tensor, outcome.error.c_str());
  CHECKF(outcome.warning.empty(), "%s: %s", what, outcome.warning.c_str());
  CHECKF(all(outcome, TensorState::kWritten), "%s", what);
  CHECKF(world.wrong_elements(seed) == 0, "%s", what);
}

void expect_untouched(World& world, const WriteOutcome& outcome, uint64_t seed, const char* what) {
  std::printf("  %s: %s\n", what, outcome.error.c_str());
  CHECKF(!outcome.error.empty() && all(outcome, TensorState::kUntouched), "%s", what);
  CHECKF(outcome.segments_opened == outcome.segments_closed, "%s: opened %lu, closed %lu", what,
         static_cast<unsigned long>(outcome.segments_opened), static_cast<unsigned long>(outcome.segments_closed));
  CHECKF(world.wrong_elements(seed) == 0, "%s: something has changed", what);
}

void segments_arrive(int ranks, int segments, int events, int gpu) {
  std::printf("%d rank(s), %d segment(s), %d event(s), from GPU %d\n", ranks, segments, events, gpu);
  Sender sender;
  World world(ranks, segments, 3, 1024);
  Shared shared = share(sender, world, gpu);
  for (const uint64_t seed : {11, 12, 11}) {
    refill(sender, shared, gpu, seed, events, events > 0 ? 30 : 0);
    const WriteJob job = world.job([&](int s) { return shared.segment(s); });
    const WriteOutcome outcome = world.store->write(job);
    expect_written(world, outcome, seed, "a write");
    CHECK(outcome.segments_opened == static_cast<uint64_t>(segments * ranks));
    CHECK(outcome.segments_closed == outcome.segments_opened);
    CHECK(outcome.bytes == static_cast<uint64_t>(segments) * world.segment_bytes());
  }
  // Kept: the next write finds it open and sees what the sender has written meanwhile.
  for (const uint64_t seed : {21, 22, 23}) {
    refill(sender, shared, gpu, seed, events, events > 0 ? 5 : 0);
    const WriteOutcome outcome = world.store->write(world.job([&](int s) { return shared.segment(s, "pool"); }));
    expect_written(world, outcome, seed, "a write out of kept segments");
    CHECK(outcome.segments_opened == (seed == 21 ? static_cast<uint64_t>(segments * ranks) : 0));
    CHECK(outcome.segments_closed == 0);
  }
  CHECK(world.store->close_mappings("pool") == static_cast<uint64_t>(segments * ranks));
  CHECK(world.store->close_mappings("pool") == 0);
}

void blocks_arrive(int ranks, int gpu) {
  std::printf("%d rank(s), expandable segments, from GPU %d\n", ranks, gpu);
  Sender sender;
  constexpr int kBlocks = 6;
  constexpr uint64_t kBlockBytes = 2 << 20;
  World world(ranks, 1, 3, static_cast<int64_t>(kBlocks * kBlockBytes / kRowBytes / 3));
  const std::vector<uint8_t> reply = sender.request({'V', gpu, kBlocks, 0, kBlockBytes, 0});
  std::vector<int> theirs(kBlocks);
  std::memcpy(theirs.data(), reply.data(), reply.size());
  for (const uint64_t seed : {31, 32, 33, 34}) {
    const std::vector<uint8_t> events = sender.request({'F', gpu, 2, 10, 0, seed});
    const bool keep = seed >= 33;
    Segment segment;
    segment.uuid = uuid_of(gpu);
    segment.block_bytes = kBlockBytes;
    segment.events = events;
    if (keep) segment.keep = "blocks";
    for (const int fd : theirs) segment.fds.push_back(ipc::take_descriptor(sender.pid, fd));
    const WriteOutcome outcome = world.store->write(world.job([&](int) { return segment; }));
    for (const int fd : segment.fds) close(fd);
    expect_written(world, outcome, seed, "a write out of blocks");
    CHECK(outcome.segments_opened == (seed == 34 ? 0u : static_cast<uint64_t>(ranks)));
    CHECK(outcome.segments_closed == (keep ? 0u : static_cast<uint64_t>(ranks)));
  }
  CHECK(world.store->close_mappings("blocks") == static_cast<uint64_t>(ranks));
}

void refusals_change_nothing_and_say_why(int ranks) {
  std::printf("refusals, %d rank(s)\n", ranks);
  auto sender = std::make_unique<Sender>();
  World world(ranks, 4, 2, 1024);
  Shared shared = share(*sender, world, 0);
  refill(*sender, shared, 0, 41, 1, 0);
  const auto job = [&] { return world.job([&](int s) { return shared.segment(s); }); };
  expect_written(world, world.store->write(job()), 41, "before");
  refill(*sender, shared, 0, 42, 1, 0);

  WriteJob bad = job();
  for (uint8_t& byte : bad.segments[2].handle) byte = static_cast<uint8_t>(byte ^ 0x5a);
  expect_untouched(world, world.store->write(bad), 41, "a handle that is none");
  bad = job();
  bad.segments[0].events[8] ^= 0x5a;
  bad.segments[0].events[20] ^= 0x5a;
  const WriteOutcome garbled = world.store->write(bad);
  std::printf("  an event handle with two bytes changed: %s\n",
              garbled.error.empty() ? "taken" : garbled.error.c_str());
  CHECK(garbled.segments_opened == garbled.segments_closed);
  bad = job();
  bad.tensors.back().offset += 2;
  const WriteOutcome reach = world.store->write(bad);
  CHECKF(reach.error.find("ends at byte") != std::string::npos, "%s", reach.error.c_str());
  CHECK(reach.error_tensor == static_cast<int>(bad.tensors.size()) - 1 && all(reach, TensorState::kUntouched));

  refill(*sender, shared, 0, 43, 1, 0);
  expect_written(world, world.store->write(job()), 43, "after refusals");
  refill(*sender, shared, 0, 44, 1, 400);
  WriteJob impatient = job();
  impatient.event_timeout_ms = 40;
  expect_untouched(world, world.store->write(impatient), 43, "an event that is late");
  expect_written(world, world.store->write(job()), 44, "the same, waited for");

  void* own = nullptr;
  cudaIpcMemHandle_t handle;
  check(cudaMalloc(&own, world.segment_bytes()), "cudaMalloc");
  check(cudaIpcGetMemHandle(&handle, own), "cudaIpcGetMemHandle");
  bad = job();
  std::memcpy(bad.segments[1].handle.data(), &handle, sizeof handle);
  expect_untouched(world, world.store->write(bad), 44, "this process's own memory");
  cudaFree(own);

  for (const fault::Point point : {fault::Point::kIpcOpen, fault::Point::kIpcEvent}) {
    for (int at = 1; at <= (point == fault::Point::kIpcOpen ? 4 * ranks : 1); at++) {
      fault::arm(point, at, fault::Action::kFail, 0);
      const WriteOutcome outcome = world.store->write(job());
      CHECK(outcome.error.find("injected fault") != std::string::npos && all(outcome, TensorState::kUntouched));
      CHECK(outcome.segments_opened == outcome.segments_closed);
    }
  }
  fault::arm(fault::Point::kIpcClose, 2, fault::Action::kFail, 0);
  const WriteOutcome left = world.store->write(job());
  CHECK(left.error.empty() && !left.warning.empty() && left.segments_closed + 1 == left.segments_opened);
  fault::disarm();
  const WriteOutcome made_up = world.store->write(job());
  CHECK(made_up.segments_closed == made_up.segments_opened + 1);

  sender->kill();
  expect_untouched(world, world.store->write(job()), 44, "a sender that has ended");
  Sender next;
  Shared fresh = share(next, world, 0);
  refill(next, fresh, 0, 45, 1, 0);
  expect_written(world, world.store->write(world.job([&](int s) { return fresh.segment(s); })), 45, "the next sender");
}

void memory_stays_flat(int rounds) {
  std::printf("%d writes\n", rounds);
  Sender sender;
  World world(1, 40, 2, 1024);
  Shared shared = share(sender, world, 0);
  size_t before = 0, after = 0, total = 0;
  for (int i = 0; i < rounds; i++) {
    refill(sender, shared, 0, static_cast<uint64_t>(50 + i), 8, 0);
    const WriteOutcome outcome = world.store->write(world.job([&](int s) { return shared.segment(s); }));
    CHECK(outcome.error.empty() && outcome.segments_opened == 40 && outcome.segments_closed == 40);
    world.ranks[0]->run([&] { check(cudaMemGetInfo(i < 5 ? &before : &after, &total), "cudaMemGetInfo"); }).get();
  }
  CHECK(world.wrong_elements(static_cast<uint64_t>(50 + rounds - 1)) == 0);
  // Other programs may use the GPU at the same time; a leak would be 40 times 2 MiB per write.
  CHECKF(before < after + (size_t{20} << 20), "free before %zu, after %zu", before, after);
}

// Several allocations share one block of the driver; this reports what opening each of them gives.
void small_allocations() {
  Sender sender;
  World world(1, 4, 1, 64);
  Shared shared = share(sender, world, 0);
  refill(sender, shared, 0, 49, 1, 0);
  const WriteOutcome outcome = world.store->write(world.job([&](int s) { return shared.segment(s); }));
  const bool right = outcome.error.empty() && world.wrong_elements(49) == 0;
  std::printf("allocations of 64 KiB: %s\n", right ? "right" : outcome.error.empty() ? "WRONG" : outcome.error.c_str());
  CHECK(outcome.segments_opened == outcome.segments_closed);
}

// A kept mapping after its sender was killed. Last: the GPU may not survive it.
void a_kept_mapping_outlives_its_sender() {
  std::printf("a sender that is killed while its segments are kept\n");
  auto sender = std::make_unique<Sender>();
  World world(1, 2, 2, 1024);
  Shared shared = share(*sender, world, 0);
  refill(*sender, shared, 0, 61, 1, 0);
  expect_written(world, world.store->write(world.job([&](int s) { return shared.segment(s, "pool"); })), 61, "before");
  sender->kill();
  shared.events.clear();
  const WriteOutcome outcome = world.store->write(world.job([&](int s) { return shared.segment(s, "pool"); }));
  std::printf("  a write out of it: %s\n", outcome.error.empty() ? "written" : outcome.error.c_str());
  if (outcome.error.empty()) CHECK(world.wrong_elements(61) == 0);
  CHECK(world.store->close_mappings("pool") == 2);
  Sender next;
  Shared fresh = share(next, world, 0);
  refill(next, fresh, 0, 62, 1, 0);
  expect_written(world, world.store->write(world.job([&](int s) { return fresh.segment(s); })), 62, "the next sender");
}

// --- costs

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--sender") == 0) {
    return refit::ipc_test::serve(std::atoi(argv[2]), std::atoi(argv[3]));
  }
  signal(SIGPIPE, SIG_IGN);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  bool quick = false, costs = false;
  double gigabytes = 16;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--bench") == 0) costs = true;
    if (std::strcmp(argv[i], "--gb") == 0 && i + 1 < argc) gigabytes = std::atof(argv[++i]);
  }
  try {
    const int gpus = gpu_count();
    std::printf("%d GPU(s)\n", gpus);
    if (costs) {
      bench(gigabytes);
      return test::finish("ipc_test --bench");
    }
    for (const int ranks : {1, 2}) {
      for (int gpu = 0; gpu < std::min(gpus, 2); gpu++) {
        segments_arrive(ranks, 1, 0, gpu);
        segments_arrive(ranks, 5, 3, gpu);
        segments_arrive(ranks, 60, 60, gpu);
        // memcheck reports a read across two adjacent mappings as out of bounds.
        if (!quick) blocks_arrive(ranks, gpu);
      }
      refusals_change_nothing_and_say_why(ranks);
    }
    memory_stays_flat(quick ? 10 : 60);
    small_allocations();
    a_kept_mapping_outlives_its_sender();
  } catch (const std::exception& e) {
    CHECKF(false, "%s", e.what());
  }
  return test::finish("ipc_test");
}
