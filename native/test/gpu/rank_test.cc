// A rank's thread, its messages, and how the failure of a GPU is noticed. Each failure runs in a process of its own,
// because it makes the GPU's context useless. Arguments: [--quick] (no failures, for compute-sanitizer).
#include "cuda/device/rank.h"

#include <cuda_runtime.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/device.h"
#include "cuda/device/check.h"
#include "cuda/device/watchdog.h"
#include "test/check.h"
#include "test/gpu/kernels/device_kernels.h"

namespace refit::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void test_run() {
  Rank rank(0, 0);
  CHECKF(has(rank.label(), "rank 0 (GPU-") && has(rank.label(), ", GPU 0)"), "%s", rank.label().c_str());
  std::thread::id first, second;
  rank.run([&] { first = std::this_thread::get_id(); }).get();
  rank.run([&] { second = std::this_thread::get_id(); }).get();
  CHECK(first == second && first != std::this_thread::get_id());
  CHECK_THROWS(rank.run([] { throw std::out_of_range("x"); }).get(), std::out_of_range);
  // In order.
  std::vector<int> order;
  std::vector<std::future<void>> futures;
  for (int i = 0; i < 100; i++) futures.push_back(rank.run([&order, i] { order.push_back(i); }));
  for (auto& future : futures) future.get();
  for (int i = 0; i < 100; i++) CHECKF(order[i] == i, "%d", i);
  // A call's own error does not stay.
  CHECK_THROWS(rank.run([] { check(cudaMemset(nullptr, 0, 1), "memset of nothing"); }).get(), CudaError);
  rank.run([&] {
        test::launch_nothing(rank.stream);
        check_launch("nothing");
        check(cudaStreamSynchronize(rank.stream), "nothing");
      })
      .get();
  // The state of a working stream is not reported as an error when a task fails.
  CHECK_THROWS(rank.run([&] {
                     test::launch_wait(200, rank.stream);
                     throw std::out_of_range("with work under way");
                   })
                   .get(),
               std::out_of_range);
  rank.run([&] {
        test::launch_nothing(rank.stream);
        check_launch("nothing, behind it");
        check(cudaStreamSynchronize(rank.stream), "nothing, behind it");
      })
      .get();
}

void test_on_all() {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < 3; r++) ranks.push_back(std::make_unique<Rank>(r, 0));
  std::atomic<int> sum{0};
  // At once: each rank waits until all are there.
  on_all(ranks, [&](Rank& rank) {
    sum += 1 << rank.index;
    while (sum != 7) std::this_thread::yield();
  });
  CHECK(sum == 7);
  std::atomic<int> ended{0};
  try {
    on_all(ranks, [&](Rank& rank) {
      if (rank.index == 1) throw std::out_of_range("rank 1");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended++;
    });
    CHECK(false);
  } catch (const std::out_of_range& e) {
    CHECK(ended == 2 && std::string(e.what()) == "rank 1");
  }
}

void test_progress() {
  Rank rank(0, 0);
  CHECK(rank.progress().where().empty());
  for (int step = 0; step < 3; step++) {
    rank.progress().begin_step();
    rank.run([&] {
          for (int layer = -1; layer < 3; layer++) {
            rank.begin_op("one", layer);
            test::launch_nothing(rank.stream);
            rank.begin_op("two", layer);
            test::launch_nothing(rank.stream);
          }
          rank.begin_op("sample");
          test::launch_nothing(rank.stream);
          check(cudaStreamSynchronize(rank.stream), "step");
        })
        .get();
    // The GPU has passed the last boundary.
    CHECKF(rank.progress().where() == "sample", "%s", rank.progress().where().c_str());
    rank.progress().end_step();
    CHECKF(rank.progress().where().empty(), "%s", rank.progress().where().c_str());
  }
  // More names than the ring holds.
  rank.progress().begin_step();
  rank.run([&] {
        for (int i = 0; i < 10000; i++) rank.begin_op("many", i);
        check(cudaStreamSynchronize(rank.stream), "step");
      })
      .get();
  CHECKF(rank.progress().where() == "layers.9999.many", "%s", rank.progress().where().c_str());
  rank.progress().end_step();
}

// Steps of four layers on `count` ranks of GPU 0; returns the watchdog's message.
std::string run_steps(int count, double patience, double* took) {
  auto health = std::make_shared<Health>();
  auto dog = new Watchdog(health, patience);  // never deleted, like the device after a loss
  auto ranks = new std::vector<std::unique_ptr<Rank>>;
  const auto began = std::make_shared<Clock::time_point>();
  try {
    dog->run([=] {
      for (int r = 0; r < count; r++) ranks->push_back(std::make_unique<Rank>(r, 0, health));
      int* value = nullptr;
      check(cudaMalloc(&value, sizeof(int)), "cudaMalloc");
      for (int step = 1; step <= 5; step++) {
        *began = Clock::now();
        for (auto& rank : *ranks) rank->progress().begin_step();
        on_all(*ranks, [&](Rank& rank) {
          for (int layer = 0; layer < 4; layer++) {
            for (const char* name : {"qkv", "down"}) {
              rank.begin_op(name, layer);
              test::launch_add_one(value, rank.stream);
              check_launch(name);
            }
          }
          rank.doing("wait for the step");
          check(cudaStreamSynchronize(rank.stream), "the step");
        });
        for (auto& rank : *ranks) rank->progress().end_step();
      }
    });
  } catch (const DeviceLost& e) {
    *took = seconds_since(*began);
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "nothing was thrown";
}

void illegal_address() {
  setenv("REFIT_CUDA_FAULT", "illegal:3", 1);
  double took = 0;
  const std::string message = run_steps(1, 100, &took);
  std::printf("  illegal address: %s (after %.3f s)\n", message.c_str(), took);
  CHECKF(has(message, "rank 0 (GPU-") && has(message, "cudaErrorIllegalAddress"), "%s", message.c_str());
  CHECKF(has(message, "layers.0.qkv") && has(message, "layers.0.down"), "%s", message.c_str());
  CHECKF(took < 1, "%f s", took);
}

void illegal_address_named() {
  setenv("REFIT_CUDA_FAULT", "illegal:2", 1);
  setenv("REFIT_CUDA_SYNC", "1", 1);
  double took = 0;
  const std::string message = run_steps(1, 100, &took);
  std::printf("  illegal address, synchronous: %s\n", message.c_str());
  CHECKF(has(message, "noticed by layers.0.qkv: cudaErrorIllegalAddress"), "%s", message.c_str());
}

void hang() {
  setenv("REFIT_CUDA_FAULT", "hang:2", 1);
  double took = 0;
  const std::string message = run_steps(1, 1.5, &took);
  std::printf("  hang: %s (after %.3f s)\n", message.c_str(), took);
  CHECKF(has(message, "rank 0 (GPU-") && has(message, "has been stuck in wait for the step"), "%s", message.c_str());
  CHECKF(has(message, "layers.0.qkv"), "%s", message.c_str());
  CHECKF(took >= 1.5 && took < 4, "%f s", took);
}

// The other rank of the same GPU gets the error, too; the caller gets the first one.
void illegal_on_one_of_two() {
  setenv("REFIT_CUDA_FAULT", "illegal:1:1", 1);
  double took = 0;
  const std::string message = run_steps(2, 100, &took);
  std::printf("  illegal address on rank 1: %s (after %.3f s)\n", message.c_str(), took);
  CHECKF(has(message, "cudaErrorIllegalAddress"), "%s", message.c_str());
  CHECKF(took < 1, "%f s", took);
}

// In a process that ends without destructors, like the server. Before the first CUDA call of this process.
void in_child(const char* name, void (*fn)()) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    fn();
    std::fflush(nullptr);
    _exit(test::failures.load() == 0 ? 0 : 1);
  }
  const auto began = Clock::now();
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (seconds_since(began) > 60) kill(child, SIGKILL);
    usleep(10000);
  }
  CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %x after %.1f s", name, status,
         seconds_since(began));
}

}  // namespace
}  // namespace refit::cuda

int main(int argc, char** argv) {
  using namespace refit::cuda;
  if (argc < 2 || std::strcmp(argv[1], "--quick") != 0) {
    in_child("illegal address", illegal_address);
    in_child("illegal address, synchronous", illegal_address_named);
    in_child("hang", hang);
    in_child("illegal address on one of two", illegal_on_one_of_two);
  }
  test_run();
  test_on_all();
  test_progress();
  return refit::test::finish("rank_test");
}
