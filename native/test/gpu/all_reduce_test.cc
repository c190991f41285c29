// Collectives of ranks on one GPU, and on GPUs of their own if there are enough. Every call has fresh numbers, and
// ranks are delayed at random, so a flag that is read too early or a buffer that is written too early gives a wrong
// sum. Arguments: [--quick] [--bench] [seed].
#include "cuda/exchange/all_reduce.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device/check.h"
#include "test/check.h"
#include "test/gpu/kernels/all_reduce_kernels.h"

using namespace refit::cuda;
using namespace refit::all_reduce_test;

namespace {

constexpr int64_t kMost = int64_t{4} << 20;  // elements
constexpr int64_t kGuard = 1024;             // elements behind buffers

// One rank: its memory, and a thread that launches its kernels.
struct Peer {
  int gpu = 0;
  cudaStream_t stream = nullptr;
  Element *sides[2] = {}, *out = nullptr;
  uint64_t* signals = nullptr;
  Report* report = nullptr;
};

class Group {
 public:
  explicit Group(const std::vector<int>& gpus) : peers_(gpus.size()) {
    for (size_t r = 0; r < gpus.size(); ++r) {
      Peer& p = peers_[r];
      p.gpu = gpus[r];
      check(cudaSetDevice(p.gpu), "cudaSetDevice");
      for (const int other : gpus) {
        if (other == p.gpu) continue;
        const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
        if (code == cudaErrorPeerAccessAlreadyEnabled) {
          cudaGetLastError();
        } else {
          check(code, "cudaDeviceEnablePeerAccess");
        }
      }
      for (Element** b : {&p.sides[0], &p.sides[1], &p.out}) {
        check(cudaMalloc(b, (kMost + kGuard) * 2), "cudaMalloc");
        launch_poison(256, *b, kMost + kGuard, nullptr);
      }
      check(cudaMalloc(&p.signals, kSignalBytes), "cudaMalloc");
      check(cudaMemset(p.signals, 0, kSignalBytes), "clear");
      check(cudaMalloc(&p.report, sizeof(Report)), "cudaMalloc");
      check(cudaMemset(p.report, 0, sizeof(Report)), "clear");
      check(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      check(cudaDeviceSynchronize(), "start");
    }
  }
  ~Group() {
    for (Peer& p : peers_) {
      cudaSetDevice(p.gpu);
      cudaStreamDestroy(p.stream);
      for (void* m : {static_cast<void*>(p.sides[0]), static_cast<void*>(p.sides[1]), static_cast<void*>(p.out),
                      static_cast<void*>(p.signals), static_cast<void*>(p.report)})
        cudaFree(m);
    }
  }

  int ranks() const { return static_cast<int>(peers_.size()); }
  Peer& operator[](int r) { return peers_[r]; }
  PeerGroup view(int rank) const {
    PeerGroup group;
    group.ranks = ranks();
    group.rank = rank;
    if (ranks() > 1 && peers_[0].gpu == peers_[1].gpu) group.blocks = kSharedBlocks;
    for (int r = 0; r < ranks(); ++r) {
      for (int side = 0; side < 2; ++side) group.buffers[side][r] = peers_[r].sides[side];
      group.signals[r] = peers_[r].signals;
    }
    return group;
  }
  // fn(rank) on a thread of each rank, then waits for its stream.
  void run(const std::function<void(int)>& fn) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r) {
      threads.emplace_back([&, r] {
        try {
          check(cudaSetDevice(peers_[r].gpu), "cudaSetDevice");
          fn(r);
          check(cudaStreamSynchronize(peers_[r].stream), "synchronize");
        } catch (const std::exception& error) {
          // The other ranks would wait for ever.
          std::fprintf(stderr, "rank %d: %s\n", r, error.what());
          std::_Exit(1);
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }

 private:
  std::vector<Peer> peers_;
};

std::string describe(Group& group) {
  std::string text = std::to_string(group.ranks()) + " ranks on GPUs";
  for (int r = 0; r < group.ranks(); ++r) text += " " + std::to_string(group[r].gpu);
  return text;
}

void check_reports(Group& group, const std::string& what) {
  for (int r = 0; r < group.ranks(); ++r) {
    Report report;
    check(cudaSetDevice(group[r].gpu), "cudaSetDevice");
    check(cudaMemcpy(&report, group[r].report, sizeof report, cudaMemcpyDeviceToHost), "report");
    CHECKF(report.wrong == 0, "%s, rank %d: %llu wrong elements; one: call %d, index %lld is %.9g, expected %.9g",
           what.c_str(), r, report.wrong, report.call, static_cast<long long>(report.index), report.got,
           report.expected);
    check(cudaMemset(group[r].report, 0, sizeof report), "clear");
  }
}

// Calls of all sizes one after another; the same plan on all ranks.
void test_sums(Group& group, unsigned seed, int calls) {
  group.run([&](int rank) {
    std::mt19937 plan(seed), own(seed * 31 + rank);
    Peer& p = group[rank];
    const PeerGroup view = group.view(rank);
    for (int call = 1; call <= calls; ++call) {
      const int size = static_cast<int>(plan() % 100), way = static_cast<int>(plan() % 6);
      const int64_t most = size < 60 ? 8192 : size < 95 ? 300000 : kMost;
      const bool gathers = way >= 4;
      int64_t count = (plan() % most) / 8 * 8 + 8;
      const int64_t columns = 8 * (1 + static_cast<int64_t>(plan() % 40)),
                    rows = std::max<int64_t>(1, count / columns / group.ranks());
      if (gathers) count = rows * columns * group.ranks();
      const int side = call % 2;
      const int64_t guarded = count + kGuard;
      launch_fill(p.sides[side], count, call, rank, p.stream);
      launch_poison(64, p.out, guarded, p.stream);
      // Ranks are late in turn, by a little and by much.
      if (own() % 16 == 0) launch_delay(1 + static_cast<int>(own() % (own() % 8 == 0 ? 300 : 20)), p.stream);
      switch (way) {
        case 0:
          all_reduce_one_shot(view, side, p.out, count, call, p.stream);
          break;
        case 1:
          all_reduce_two_shot(view, side, p.out, count, call, p.stream);
          break;
        case 4:
        case 5:
          all_gather(view, side, p.out, rows, columns, call, p.stream);
          break;
        default:
          all_reduce(view, side, p.out, count, call, p.stream);
      }
      if (own() % 32 == 0) launch_delay(1 + static_cast<int>(own() % 20), p.stream);
      if (gathers) {
        launch_check_gather(p.out, count, guarded, call, group.ranks(), columns, p.report, p.stream);
      } else {
        launch_check(64, p.out, count, guarded, call, group.ranks(), p.report, p.stream);
      }
      check_launch("test");
    }
  });
  check_reports(group, describe(group) + ", sums");
}

// As in the head: every rank writes its part of rank 0's buffer, all synchronize, rank 0 reads, all synchronize.
void test_barrier(Group& group, unsigned seed, int calls) {
  constexpr int64_t kCount = 65536;
  group.run([&](int rank) {
    std::mt19937 own(seed * 77 + rank);
    Peer& p = group[rank];
    const PeerGroup view = group.view(rank);
    uint64_t epoch = uint64_t{1} << 40;  // above all epochs of the sums, and beyond 32 bits
    for (int call = 1; call <= calls; ++call) {
      if (own() % 16 == 0) launch_delay(1 + static_cast<int>(own() % 30), p.stream);
      launch_share(group[0].sides[0], kCount, call, rank, group.ranks(), p.stream);
      barrier(view, ++epoch, p.stream);
      if (rank == 0) {
        if (own() % 16 == 0) launch_delay(1 + static_cast<int>(own() % 30), p.stream);
        // All elements are rank 0's numbers, so the sum is over one.
        launch_check(32, p.sides[0], kCount, kCount, call, 1, p.report, p.stream);
      }
      barrier(view, ++epoch, p.stream);
      check_launch("test");
    }
  });
  check_reports(group, describe(group) + ", barrier");
}

void bench(Group& group) {
  std::vector<float> ms(group.ranks());
  std::vector<cudaEvent_t> start(group.ranks()), stop(group.ranks());
  uint64_t epoch = uint64_t{1} << 41;
  const int repeats = 200;
  for (const int64_t count : {4096, 32768, 131072, 524288, 2097152, 4194304}) {
    for (const bool two_shot : {false, true}) {
      const uint64_t base = epoch;
      epoch += repeats + 20;
      group.run([&](int r) {
        Peer& p = group[r];
        const PeerGroup view = group.view(r);
        check(cudaEventCreate(&start[r]), "event"), check(cudaEventCreate(&stop[r]), "event");
        for (int i = -20; i < repeats; ++i) {
          if (i == 0) check(cudaEventRecord(start[r], p.stream), "record");
          const uint64_t call = base + 21 + i;
          (two_shot ? all_reduce_two_shot : all_reduce_one_shot)(view, (i + 20) % 2, p.out, count, call, p.stream);
        }
        check(cudaEventRecord(stop[r], p.stream), "record");
        check(cudaEventSynchronize(stop[r]), "wait");
        check(cudaEventElapsedTime(&ms[r], start[r], stop[r]), "elapsed");
      });
      const double us = *std::max_element(ms.begin(), ms.end()) * 1e3 / repeats;
      std::printf("all_reduce %s, %s: %8lld KB: %7.1f us, %6.1f GB/s of message\n", describe(group).c_str(),
                  two_shot ? "two-shot" : "one-shot", static_cast<long long>(count * 2 / 1024), us, count * 2e-3 / us);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Before CUDA starts: a kernel that is loaded at its first launch may wait for a GPU that spins in a collective, and
  // streams of ranks on one GPU must not share a queue.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  bool quick = false, benchmark = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--bench") == 0) {
      benchmark = true;
    } else {
      seed = static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10));
    }
  }
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  std::printf("all_reduce_test: seed %u, %d GPUs\n", seed, gpus);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    if (quick && ranks > 2) continue;
    std::vector<std::vector<int>> places{std::vector<int>(ranks, 0)};
    if (ranks > 1 && gpus >= ranks) {
      places.emplace_back(ranks);
      for (int r = 0; r < ranks; ++r) places.back()[r] = r;
    }
    for (const std::vector<int>& place : places) {
      Group group(place);
      test_sums(group, seed, quick ? 50 : ranks == 2 || place.back() != 0 ? 10000 : 2000);
      test_barrier(group, seed, quick ? 20 : 2000);
      std::printf("%s: done\n", describe(group).c_str());
      if (benchmark && ranks > 1) bench(group);
    }
  }
  return refit::test::finish("all_reduce_test");
}
