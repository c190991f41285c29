// ipc_test --bench: the cost of opening, closing and events, and the rate of whole writes.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "test/check.h"
#include "test/gpu/ipc/ipc_world.cuh"

namespace {

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

// Whether opening and closing wait for the GPU's work, and the gain of doing them meanwhile.
void beside_copies(World& world, GpuIpc& driver, const Shared& shared) {
  Rank& rank = *world.ranks[0];
  const auto count = static_cast<size_t>(world.segments);
  std::vector<ipc::Mapping> open(count);
  const auto copy = [&](size_t s) {
    check(cudaMemcpyAsync(world.params.at(0, static_cast<int>(s)), reinterpret_cast<void*>(open[s].base),
                          world.segment_bytes(), cudaMemcpyDeviceToDevice, rank.stream),
          "cudaMemcpyAsync");
  };
  rank.run([&] {
        refit::ipc_test::spin(100'000'000, rank.stream);
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

// The cost of a write apart from its bytes.
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
  // Segments of whole pages of 2 MiB, like torch's allocator has, and segments of one row more.
  constexpr int64_t kPageRows = (2 << 20) / kRowBytes;
  for (const auto& [segments, beyond] : {std::pair{1, 0}, {32, 0}, {195, 0}, {195, 2}}) {
    Sender sender;
    const auto rows = static_cast<int64_t>(gigabytes * 1e9 / segments / kRowBytes) / kPageRows * kPageRows + beyond;
    World world(1, segments, 1, rows);
    Shared shared = share(sender, world, 0);
    const double bytes = static_cast<double>(world.segment_bytes()) * segments;
    std::printf("%d segment(s) of %lu bytes, %.2f GB\n", segments, static_cast<unsigned long>(world.segment_bytes()),
                bytes / 1e9);
    GpuIpc driver(world.ranks);
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
