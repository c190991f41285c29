// Weights out of another process's memory on the cards: ordinary segments, expandable ones, events, what is kept, and
// what goes wrong. The other process is this program again (ipc_sender.cuh).
//   ipc_test [--quick]
//   ipc_test --bench [--gb 16]    what opening, closing and events cost, and the rate of whole writes
//
// The executor and the sessions are compiled here once more with their fault points; the library's are then not linked.
#define REFIT_FAULTS
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "core/fault.cc"
#include "core/write_check.h"
#include "cuda/ipc_driver.h"
#include "cuda/peers.h"
#include "cuda/uuid.h"
#include "cuda/write.h"
#include "cuda/write_run.cc"
#include "test/check.h"
#include "test/gpu/ipc_sender.cuh"
#include "transport/ipc_descriptor.h"
#include "transport/ipc_mappings.cc"
#include "transport/ipc_session.cc"

using namespace refit;
using namespace refit::cuda;
using refit::ipc_test::Command;
using refit::ipc_test::count_wrong;
using refit::ipc_test::Sender;
using refit::ipc_test::Wrong;

namespace {

constexpr int64_t kCols = 512;
constexpr uint64_t kRowBytes = kCols * 2;

int card_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

std::string uuid_of(int card) {
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, card), "cudaGetDeviceProperties");
  return uuid_text(prop.uuid);
}

// `tensors` parameters of `rows` rows in each of `segments` segments; every rank holds its share of the rows.
struct World {
  World(int ranks_wanted, int segments, int tensors, int64_t rows)
      : segments(segments), tensors(tensors), rows(rows), count(ranks_wanted) {
    const int cards = card_count();
    for (int r = 0; r < count; r++) ranks.push_back(std::make_unique<Rank>(r, r % cards));
    std::vector<int> used;
    for (const auto& rank : ranks) used.push_back(rank->device);
    on_all(ranks, [&](Rank& rank) { enable_peers(rank, used); });
    params.ranks = &ranks;
    for (int p = 0; p < segments * tensors; p++)
      params.shapes.push_back({"p" + std::to_string(p), rows / count, kCols});
    blocks.resize(static_cast<size_t>(count));
    const uint64_t each = static_cast<uint64_t>(rows / count) * kRowBytes;
    for (int r = 0; r < count; r++) {
      ranks[r]
          ->run([&] { check(cudaMalloc(&blocks[r], each * params.shapes.size()), "cudaMalloc(parameters)"); })
          .get();
      for (size_t p = 0; p < params.shapes.size(); p++) {
        params.addresses.push_back(reinterpret_cast<bf16*>(static_cast<uint8_t*>(blocks[r]) + p * each));
      }
    }
    store = std::make_unique<CardStore>(params, 8);
  }
  ~World() {
    store.reset();
    for (int r = 0; r < count; r++) ranks[r]->run([&] { cudaFree(blocks[r]); }).get();
  }

  uint64_t segment_bytes() const { return static_cast<uint64_t>(rows) * kRowBytes * static_cast<uint64_t>(tensors); }

  // A job that reads all from the segments, each of which `make` describes.
  template <typename Make>
  WriteJob job(Make make) const {
    WriteJob job;
    for (int s = 0; s < segments; s++) {
      Source source;
      source.segment = s;
      job.sources.push_back(source);
      job.segments.push_back(make(s));
      for (int t = 0; t < tensors; t++) {
        Tensor tensor;
        tensor.source = s;
        tensor.offset = static_cast<uint64_t>(t) * static_cast<uint64_t>(rows) * kRowBytes;
        tensor.rows = rows;
        tensor.cols = kCols;
        tensor.row_bytes = kRowBytes;
        tensor.col_bytes = 2;
        const int index = static_cast<int>(job.tensors.size());
        job.tensors.push_back(tensor);
        for (int r = 0; r < count; r++) {
          Rect rect;
          rect.tensor = index;
          rect.rank = r;
          rect.param = index;
          rect.src_row = r * (rows / count);
          rect.rows = rows / count;
          rect.cols = kCols;
          job.rects.push_back(rect);
        }
      }
    }
    check_write(job, count, params.shapes);
    return job;
  }

  // Elements that are not what the sender wrote with the seed.
  uint64_t wrong_elements(uint64_t seed) {
    uint64_t sum = 0;
    for (int r = 0; r < count; r++) {
      for (size_t p = 0; p < params.shapes.size(); p++) {
        Wrong host{0, ~0ull};
        ranks[r]
            ->run([&] {
              Wrong* counter = nullptr;
              check(cudaMalloc(&counter, sizeof host), "cudaMalloc");
              check(cudaMemcpy(counter, &host, sizeof host, cudaMemcpyHostToDevice), "cudaMemcpy");
              const uint64_t elements = static_cast<uint64_t>(rows / count) * kCols;
              const uint64_t from = (p % tensors * static_cast<uint64_t>(rows) + r * (rows / count)) * kCols;
              count_wrong<<<256, 256, 0, ranks[r]->stream>>>(
                  reinterpret_cast<const uint16_t*>(params.at(r, static_cast<int>(p))), elements, from, seed,
                  p / tensors, counter);
              check(cudaStreamSynchronize(ranks[r]->stream), "count_wrong");
              check(cudaMemcpy(&host, counter, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
              cudaFree(counter);
            })
            .get();
        if (host.count > 0 && sum == 0) {
          std::fprintf(stderr, "rank %d parameter %zu: %llu wrong elements, the first at %llu\n", r, p, host.count,
                       host.first);
        }
        sum += host.count;
      }
    }
    return sum;
  }

  const int segments, tensors;
  const int64_t rows;
  const int count;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<void*> blocks;
  CardParams params;
  std::unique_ptr<CardStore> store;
};

struct Shared {
  std::vector<uint8_t> handles, events;
  std::string uuid;

  Segment segment(int s, std::string keep = "") const {
    Segment out;
    out.uuid = uuid;
    out.handle.assign(handles.begin() + s * 64, handles.begin() + (s + 1) * 64);
    if (s == 0) out.events = events;
    out.keep = std::move(keep);
    return out;
  }
};

Shared share(Sender& sender, const World& world, int card) {
  return {sender.ask({'A', card, world.segments, 0, world.segment_bytes(), 0}), {}, uuid_of(card)};
}

void refill(Sender& sender, Shared& shared, int card, uint64_t seed, int events, int spin_ms) {
  shared.events = sender.ask({'F', card, events, spin_ms, 0, seed});
}

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

void segments_arrive(int ranks, int segments, int events, int card) {
  std::printf("%d rank(s), %d segment(s), %d event(s), from card %d\n", ranks, segments, events, card);
  Sender sender;
  World world(ranks, segments, 3, 1024);
  Shared shared = share(sender, world, card);
  for (const uint64_t seed : {11, 12, 11}) {
    refill(sender, shared, card, seed, events, events > 0 ? 30 : 0);
    const WriteJob job = world.job([&](int s) { return shared.segment(s); });
    const WriteOutcome outcome = world.store->write(job);
    expect_written(world, outcome, seed, "a write");
    CHECK(outcome.segments_opened == static_cast<uint64_t>(segments * ranks));
    CHECK(outcome.segments_closed == outcome.segments_opened);
    CHECK(outcome.bytes == static_cast<uint64_t>(segments) * world.segment_bytes());
  }
  // Kept: found open by the next write, which sees what the sender wrote meanwhile.
  for (const uint64_t seed : {21, 22, 23}) {
    refill(sender, shared, card, seed, events, events > 0 ? 5 : 0);
    const WriteOutcome outcome = world.store->write(world.job([&](int s) { return shared.segment(s, "pool"); }));
    expect_written(world, outcome, seed, "a write out of kept segments");
    CHECK(outcome.segments_opened == (seed == 21 ? static_cast<uint64_t>(segments * ranks) : 0));
    CHECK(outcome.segments_closed == 0);
  }
  CHECK(world.store->close_mappings("pool") == static_cast<uint64_t>(segments * ranks));
  CHECK(world.store->close_mappings("pool") == 0);
}

void blocks_arrive(int ranks, int card) {
  std::printf("%d rank(s), expandable segments, from card %d\n", ranks, card);
  Sender sender;
  constexpr int kBlocks = 6;
  constexpr uint64_t kBlockBytes = 2 << 20;
  World world(ranks, 1, 3, static_cast<int64_t>(kBlocks * kBlockBytes / kRowBytes / 3));
  const std::vector<uint8_t> reply = sender.ask({'V', card, kBlocks, 0, kBlockBytes, 0});
  std::vector<int> theirs(kBlocks);
  std::memcpy(theirs.data(), reply.data(), reply.size());
  for (const uint64_t seed : {31, 32, 33, 34}) {
    const std::vector<uint8_t> events = sender.ask({'F', card, 2, 10, 0, seed});
    const bool keep = seed >= 33;
    Segment segment;
    segment.uuid = uuid_of(card);
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
  // Other programs may use the card at the same time; what leaked here would be 40 times 2 MiB a write.
  CHECKF(before < after + (size_t{20} << 20), "free before %zu, after %zu", before, after);
}

// Several of them lie in one block of the driver: what opening each gives is the driver's affair, told here.
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

// What a kept mapping is worth when its sender has been killed. Last: the card may not survive it.
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

double ms_of(const std::function<void()>& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// fn(0) ... fn(count - 1) on threads; ms.
double spread(int threads, size_t count, const std::function<void(size_t)>& fn) {
  std::atomic<size_t> next = 0;
  return ms_of([&] {
    std::vector<std::thread> all;
    for (int t = 0; t < threads; t++) {
      all.emplace_back([&] {
        for (size_t i = next++; i < count; i = next++) fn(i);
      });
    }
    for (std::thread& thread : all) thread.join();
  });
}

// Whether opening and closing wait for what the card is doing, and what is gained by doing them meanwhile.
void beside_copies(World& world, CardIpc& driver, const Shared& shared) {
  Rank& rank = *world.ranks[0];
  const auto count = static_cast<size_t>(world.segments);
  std::vector<ipc::Mapping> open(count);
  const auto copy = [&](size_t s) {
    check(cudaMemcpyAsync(world.params.at(0, static_cast<int>(s)), reinterpret_cast<void*>(open[s].base),
                          world.segment_bytes(), cudaMemcpyDeviceToDevice, rank.stream),
          "cudaMemcpyAsync");
  };
  rank.run([&] {
        refit::ipc_test::spin<<<1, 1, 0, rank.stream>>>(100'000'000);
        const double opened = ms_of([&] { open[0] = driver.open(0, shared.segment(0)); });
        const bool still = cudaStreamQuery(rank.stream) == cudaErrorNotReady;
        const double closed = ms_of([&] { driver.close(0, open[0]); });
        const bool after = cudaStreamQuery(rank.stream) == cudaErrorNotReady;
        std::printf("  while a kernel of 100 ms runs: open %.2f ms (%s), close %.2f ms (%s)\n", opened,
                    still ? "it runs on" : "it has ended", closed, after ? "it runs on" : "it has ended");
        check(cudaStreamSynchronize(rank.stream), "spin");
        for (const size_t group : {size_t{2}, size_t{6}}) {
          for (const bool between : {false, true}) {
            std::vector<double> times, copied;
            for (int round = 0; round < 5; round++) {
              double until = 0;
              std::vector<cudaEvent_t> done;
              times.push_back(ms_of([&] {
                until = ms_of([&] {
                  for (size_t s = 0; s < count; s++) {
                    open[s] = driver.open(0, shared.segment(static_cast<int>(s)));
                    if ((s + 1) % group != 0 && s + 1 < count) continue;
                    for (size_t i = s / group * group; i <= s; i++) copy(i);
                    done.emplace_back();
                    check(cudaEventCreateWithFlags(&done.back(), cudaEventDisableTiming), "cudaEventCreate");
                    check(cudaEventRecord(done.back(), rank.stream), "cudaEventRecord");
                    const size_t past = s / group;
                    if (!between || past < 2) continue;
                    check(cudaEventSynchronize(done[past - 2]), "cudaEventSynchronize");
                    for (size_t i = (past - 2) * group; i < (past - 1) * group; i++) driver.close(0, open[i]);
                  }
                  check(cudaStreamSynchronize(rank.stream), "copy");
                });
                const size_t past = done.size();
                for (size_t i = between && past > 2 ? (past - 2) * group : 0; i < count; i++) driver.close(0, open[i]);
              }));
              copied.push_back(until);
              for (cudaEvent_t event : done) cudaEventDestroy(event);
            }
            std::printf(
                "  one thread, %zu open and then copied at a time%s: copied after %.2f ms, closed after %.2f ms\n",
                group, between ? ", closed in between" : "", median(copied), median(times));
          }
        }
      })
      .get();
}

// What a write costs apart from its bytes.
void hops() {
  World world(1, 1, 1, 512);
  std::vector<double> tasks, writes;
  const WriteJob nothing;
  for (int round = 0; round < 300; round++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    tasks.push_back(ms_of([&] { world.ranks[0]->run([] {}).get(); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    writes.push_back(ms_of([&] { world.store->write(nothing); }));
  }
  std::printf("after 2 ms of idleness: a task on a rank's thread and back %.3f ms, a write of nothing %.3f ms\n",
              median(tasks), median(writes));
}

void bench(double gigabytes) {
  hops();
  // Segments of whole pages of 2 MiB, as torch's allocator has them, and of one row more.
  constexpr int64_t kPageRows = (2 << 20) / kRowBytes;
  for (const auto& [segments, beyond] : {std::pair{1, 0}, {32, 0}, {195, 0}, {195, 2}}) {
    Sender sender;
    const auto rows = static_cast<int64_t>(gigabytes * 1e9 / segments / kRowBytes) / kPageRows * kPageRows + beyond;
    World world(1, segments, 1, rows);
    Shared shared = share(sender, world, 0);
    const double bytes = static_cast<double>(world.segment_bytes()) * segments;
    std::printf("%d segment(s) of %lu bytes, %.2f GB\n", segments, static_cast<unsigned long>(world.segment_bytes()),
                bytes / 1e9);
    CardIpc driver(world.ranks);
    for (const int threads : {1, 2, 4, 8}) {
      std::vector<ipc::Mapping> open(static_cast<size_t>(segments));
      std::vector<double> opens, closes;
      for (int round = 0; round < 5; round++) {
        opens.push_back(spread(threads, open.size(),
                               [&](size_t s) { open[s] = driver.open(0, shared.segment(static_cast<int>(s))); }));
        closes.push_back(spread(threads, open.size(), [&](size_t s) { driver.close(0, open[s]); }));
      }
      std::printf("  %d thread(s): open %.2f ms (%.1f us each), close %.2f ms (%.1f us each)\n", threads, median(opens),
                  median(opens) * 1000 / segments, median(closes), median(closes) * 1000 / segments);
    }
    {
      std::vector<ipc::Mapping> open;
      for (int s = 0; s < segments; s++) open.push_back(driver.open(0, shared.segment(s)));
      std::vector<double> copies;
      for (int round = 0; round < 5; round++) {
        copies.push_back(ms_of([&] {
          world.ranks[0]
              ->run([&] {
                for (int s = 0; s < segments; s++) {
                  check(cudaMemcpyAsync(world.params.at(0, s), reinterpret_cast<void*>(open[s].base),
                                        world.segment_bytes(), cudaMemcpyDeviceToDevice, world.ranks[0]->stream),
                        "cudaMemcpyAsync");
                }
                check(cudaStreamSynchronize(world.ranks[0]->stream), "copy");
              })
              .get();
        }));
      }
      std::printf("  cudaMemcpyAsync out of open segments: %.2f ms, %.0f GB/s\n", median(copies),
                  bytes / median(copies) / 1e6);
      for (const ipc::Mapping& mapping : open) driver.close(0, mapping);
    }
    beside_copies(world, driver, shared);
    for (const int events : {0, 1, 400}) {
      refill(sender, shared, 0, 71, events, 0);
      if (events == 400) {
        for (const int threads : {1, 2, 4, 8}) {
          std::vector<uint64_t> ids(400);
          std::vector<double> opens, closes, looks;
          for (int round = 0; round < 3; round++) {
            opens.push_back(spread(threads, ids.size(),
                                   [&](size_t e) { ids[e] = driver.open_event(0, shared.events.data() + e * 64); }));
            looks.push_back(ms_of([&] {
              for (const uint64_t id : ids) driver.event_done(0, id);
            }));
            closes.push_back(spread(threads, ids.size(), [&](size_t e) { driver.close_event(0, ids[e]); }));
          }
          std::printf("  400 events, %d thread(s): open %.2f ms, look at all %.2f ms, destroy %.2f ms\n", threads,
                      median(opens), median(looks), median(closes));
        }
      }
      for (const bool keep : {false, true}) {
        std::vector<double> times;
        for (int round = 0; round < 7; round++) {
          const WriteJob job = world.job([&](int s) { return shared.segment(s, keep ? "pool" : ""); });
          WriteOutcome outcome;
          times.push_back(ms_of([&] { outcome = world.store->write(job); }));
          CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
        }
        std::printf("  write, %d event(s)%s: first %.2f ms, median %.2f ms, %.0f GB/s\n", events, keep ? ", kept" : "",
                    times[0], median(times), bytes / median(times) / 1e6);
        world.store->close_mappings("pool");
      }
    }
    CHECK(world.wrong_elements(71) == 0);
  }
}

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
    const int cards = card_count();
    std::printf("%d card(s)\n", cards);
    if (costs) {
      bench(gigabytes);
      return test::finish("ipc_test --bench");
    }
    for (const int ranks : {1, 2}) {
      for (int card = 0; card < std::min(cards, 2); card++) {
        segments_arrive(ranks, 1, 0, card);
        segments_arrive(ranks, 5, 3, card);
        segments_arrive(ranks, 60, 60, card);
        blocks_arrive(ranks, card);
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
