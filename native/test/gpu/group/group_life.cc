// Process groups of NCCL against native/test/nccl_loop.cc, whose ranks are threads and whose GPUs are host memory:
// joining, giving up, ending. group_bytes.cc tests the transfers. Built and run by test/native/nccl-groups.test.ts.
// Arguments: the library's file [seed].
#include <dirent.h>
#include <dlfcn.h>

#include <cstdlib>

#include "core/device.h"
#include "core/memory_error.h"
#include "cuda/group/group_library.h"
#include "cuda/group/group_messages.h"
#include "test/gpu/group/group_world.h"

using namespace refit;
using namespace refit::cuda;
using namespace refit::test;

namespace {

size_t threads() {
  size_t count = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (readdir(folder) != nullptr) count++;
  closedir(folder);
  return count;
}

// As after any other failure, the peers notice it: they do not wait for a rank that has given up.
void test_a_copy_that_fails() {
  Engine engine(1);
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 2, 0);
  auto group = engine.group({2, 1});
  connect(*group, trainer, id);
  group->stage(1000);
  const auto data = coded(5, 999);
  trainer.broadcast(data);
  group->receive(0, {{0, 999}}, 0, in(20));
  trainer.stream_wait();
  trainer.comm->check();
  gpus.downloads_fail = true;
  expect(failure_of([&] { group->read(0, 0, 999, in(20)); }, GroupErrorKind::kBroken), {"reading", "the copy failed"});
  gpus.downloads_fail = false;
  expect(failure_of([&] { group->read(0, 0, 999, in(20)); }, GroupErrorKind::kBroken), {"the copy failed"});
  CHECK_THROWS(trainer.comm->check(), NcclError);
  trainer.comm->abort();
  group->end();
  expect_none_left("a copy that fails");
}

void test_warm_up() {
  Engine engine(1);
  NcclGroupOptions options{2, 0};
  options.warm_up = true;
  auto group = engine.group(options);  // first, as in TRL
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 2, 1);
  std::thread joining([&] {
    trainer.join();
    trainer.barrier();
  });
  group->connect(id.data(), in(20));
  joining.join();
  trainer.stream_wait();
  CHECKF(trainer.sum() == 1, "the sum is %g", trainer.sum());
}

void test_refused() {
  Engine engine(2);
  expect(failure_of(
             [&] {
               engine.group({2, 1});
             },
             GroupErrorKind::kRefused),
         {"ranks 1 to 2 do not fit into a group of 2", "from its first rank on"});
  NcclGroupOptions wrong{3, 1};
  wrong.core_rank = 2;
  expect(failure_of([&] { engine.group(wrong); }, GroupErrorKind::kRefused), {"rank 2 does not exist"});
  const std::string kept = library;
  library = "/nowhere/libnccl.so.2";
  expect(failure_of(
             [&] {
               engine.group({3, 1});
             },
             GroupErrorKind::kRefused),
         {"trainer's torch", "/nowhere/libnccl.so.2"});
  expect(failure_of([&] { nccl_group_id(library); }, GroupErrorKind::kRefused), {"/nowhere/libnccl.so.2"});
  library = kept;

  const std::vector<std::string> same{"GPU-0a", "GPU-0A"}, two{"GPU-0a", "GPU-0b"};
  NcclGroupOptions options{3, 1};
  expect(failure_of([&] { check_group_gpus(same, options); }, GroupErrorKind::kSharedGpu),
         {"rank 1 and rank 0 share GPU-0A"});
  options.core_rank = 1;
  check_group_gpus(same, options);
  options.core_rank = -1;
  options.peer_gpus = {"GPU-0c", "0B"};
  expect(failure_of([&] { check_group_gpus(two, options); }, GroupErrorKind::kSharedGpu),
         {"rank 1 and the trainer share GPU-0b"});

  // NCCL's refusals when all ranks have joined.
  for (const auto& [message, kind] :
       {std::pair{"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000", GroupErrorKind::kSharedGpu},
        std::pair{"Mismatched NCCL version detected : rank 0 version 22703 rank 1 version 22809",
                  GroupErrorKind::kNcclVersion}}) {
    control->join_fails = message;
    auto group = engine.group({3, 1});
    expect(failure_of([&] { group->connect(nccl_group_id(library).data(), in(5)); }, kind),
           {message, "NCCL group of 3 (ranks 1-2 here), connecting by NCCL 2.28.9, ", "loop GPU"});
    control->join_fails = nullptr;
  }
  expect(failure_of(
             [] {
               class Cpu : public Device {
                 DeviceInfo info() const override { return {}; }
                 const void* address(int, int, int) const override { return nullptr; }
                 void begin(const StepBatch&) override {}
                 void collect(StepResult&) override {}
                 WriteOutcome write(const WriteJob&, Access) override { return {}; }
                 void read(int, int, int64_t, int64_t, int64_t, int64_t, uint8_t*, Access) override {}
                 std::vector<uint64_t> checksum(const std::vector<Rect>&, const std::vector<int64_t>&,
                                                Access) override {
                   return {};
                 }
                 void scramble(uint64_t, int) override {}
                 uint64_t release_memory(uint32_t, bool) override { return 0; }
                 bool resume_memory(uint32_t) override { return false; }
               } cpu;
               static_cast<Device&>(cpu).nccl_group({});
             },
             GroupErrorKind::kRefused),
         {"gloo"});
}

// Every call ends in time if the other side does not take part, and a new group works at once.
void test_never(bool deaf) {
  control->deaf = deaf ? 1 : 0;
  Engine engine(2);
  const auto id = nccl_group_id(library);
  {
    // The other rank never joins.
    auto group = engine.group({3, 1});
    const auto began = Clock::now();
    expect(failure_of([&] { group->connect(id.data(), in(0.3)); }, GroupErrorKind::kTimeout),
           {"connecting", "rank ", "of 3, joining the communicator: not done after 0."});
    CHECKF(since(began) >= 0.25 && since(began) < 10, "%g s", since(began));
    expect(failure_of([&] { group->barrier(in(5)); }, GroupErrorKind::kBroken), {"failed before", "not done after"});
    expect(failure_of([&] { group->connect(id.data(), in(5)); }, GroupErrorKind::kBroken), {"not done after"});
  }
  {
    auto group = engine.group({3, 1});
    expect(failure_of([&] { group->connect(id.data(), in(-1)); }, GroupErrorKind::kTimeout), {"has passed"});
  }
  CHECK(control->live == 0);
  const auto joined = [&](Trainer& trainer, const std::vector<uint8_t>& unique) {
    auto group = engine.group({3, 1});
    std::thread joining([&] { trainer.join(); });
    group->connect(unique.data(), in(20));
    joining.join();
    group->stage(10000);
    return group;
  };
  {
    // It stops in the middle of the second broadcast of three.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    const auto data = coded(1, 3000);
    trainer.broadcast(data);
    const auto began = Clock::now();
    const std::string message = failure_of(
        [&] {
          group->receive(0, {{0, 3000}, {3072, 3000}, {6144, 3000}}, 0, in(0.4));
        },
        GroupErrorKind::kTimeout);
    expect(message, {"NCCL group of 3 (ranks 1-2 here), receiving, rank ",
                     "receiving from rank 0, broadcast 2 of 3: not done after 0."});
    CHECKF(since(began) < 10, "%g s", since(began));
    CHECKF(control->live == 1, "%d: ours were not aborted", control->live);
    trainer.comm->abort();
  }
  {
    // Other sizes than announced.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    const auto data = coded(1, 3000);
    trainer.broadcast(data);
    expect(failure_of(
               [&] {
                 group->receive(0, {{0, 3001}}, 0, in(0.4));
               },
               GroupErrorKind::kTimeout),
           {"broadcast 1 of 1"});
    trainer.comm->abort();
  }
  {
    // It dies: NCCL reports it, or only the deadline does.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    std::thread dying([&] {
      sleep_ms(100);
      trainer.comm->abort();
    });
    const auto began = Clock::now();
    const std::string message = failure_of(
        [&] {
          group->receive(1, {{0, 100}}, 0, in(deaf ? 0.5 : 20));
        },
        deaf ? GroupErrorKind::kTimeout : GroupErrorKind::kBroken);
    if (!deaf) expect(message, {"remote process exited"});
    CHECKF(since(began) < 10, "%g s", since(began));
    dying.join();
  }
  {
    // Another thread aborts the group in every kind of wait.
    for (int where = 0; where < 3; where++) {
      const auto unique = nccl_group_id(library);
      Trainer trainer(unique, 3, 0);
      std::unique_ptr<GpuGroup> group = where == 0 ? engine.group({3, 1}) : joined(trainer, unique);
      std::thread other([&] {
        sleep_ms(100);
        group->abort("the group was destroyed");
      });
      const auto began = Clock::now();
      const std::string message = failure_of(
          [&] {
            if (where == 0) group->connect(unique.data(), in(60));
            if (where == 1) group->receive(0, {{0, 5}}, 0, in(60));
            if (where == 2) group->barrier(in(60));
          },
          GroupErrorKind::kBroken);
      expect(message, {"the group was destroyed"});
      CHECKF(since(began) < 10, "%g s", since(began));
      other.join();
      expect(failure_of([&] { group->barrier(in(5)); }, GroupErrorKind::kBroken), {"the group was destroyed"});
      group->end();
      if (trainer.comm) trainer.comm->abort();
    }
  }
  control->deaf = 0;
  // Not enough memory: the error says so, and all memory is given back.
  gpus.room = 512;
  auto group = engine.group({3, 1});
  CHECK_THROWS(group->connect(id.data(), in(5)), NoMemory);
  gpus.room = int64_t{1} << 40;
}

void test_rounds() {
  const size_t before = threads();
  for (int round = 0; round < 40; round++) {
    Engine engine(2);
    auto group = engine.group({3, 1});
    const auto id = nccl_group_id(library);
    Trainer trainer(id, 3, 0);
    connect(*group, trainer, id);
    group->stage(1 << 16);
    const auto data = coded(static_cast<uint64_t>(round), 1 << 16);
    trainer.broadcast(data);
    group->receive(round % 2, {{0, 1 << 16}}, 0, in(20));
    CHECK(std::memcmp(group->staged(round % 2).source.of(1), data.data(), data.size()) == 0);
    if (round % 4 == 1) group->abort("enough");
    if (round % 4 != 3) group->end();
    trainer.stream_wait();
  }
  expect_none_left("rounds");
  // Threads of aborts from before the rounds may have ended since; a joined thread may be listed a little longer.
  for (const auto began = Clock::now(); threads() > before && since(began) < 10;) sleep_ms(10);
  CHECKF(threads() <= before, "%zu threads, %zu before", threads(), before);
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  library = argv[1];
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)) : 1;
  void* const handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return 3;
  control = static_cast<LoopControl*>(dlsym(handle, "loop_control"));
  test_bytes(seed);
  test_messages();
  test_a_copy_that_fails();
  test_warm_up();
  expect_none_left("warm-up");
  test_refused();
  expect_none_left("refused");
  for (const bool deaf : {false, true}) {
    test_never(deaf);
    expect_none_left("never");
  }
  test_rounds();
  return refit::test::finish("group_life");
}
