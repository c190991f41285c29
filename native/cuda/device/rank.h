// One tensor-parallel rank: its GPU, its streams, and the thread that makes every CUDA call for them.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/quiet_thread.h"
#include "cuda/device/health.h"
#include "cuda/device/progress.h"

namespace refit::cuda {

class Rank {
 public:
  // For the streams: blocks of steps' kernels go first when a multiprocessor has room.
  enum class Priority { kSteps, kBesideSteps };

  // Starts the thread, makes the GPU current on it and creates the streams. Throws CudaError. `health` (optional)
  // records failures and what the thread is doing.
  Rank(int index, int device, std::shared_ptr<Health> health = nullptr, Priority priority = Priority::kSteps);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  const int index;                // tensor-parallel rank
  const int device;               // runtime ordinal of its GPU
  cudaStream_t stream = nullptr;  // steps, scatters
  cudaStream_t copy = nullptr;    // asynchronous copies that overlap with `stream`

  // Runs fn on the rank's thread; its exceptions come out of the future. An error that the GPU repeats from then on
  // (see is_sticky) comes out as DeviceLost with the rank, the GPU, the error and the operation.
  std::future<void> run(std::function<void()> fn);

  // Records the current operation for the watchdog; call it before everything that can get stuck in a GPU. Each call
  // begins a new deadline. `operation`: a string literal, or a name that lives as long as the device.
  void doing(const char* operation) { activity_->begin(operation); }
  // The thread waits for something other than a GPU (a disk, a caller): no deadline until the next doing().
  void waiting(const char* operation) { activity_->begin(operation, false); }
  const char* last_operation() const { return activity_->operation.load(std::memory_order_relaxed); }

  // Call it before every launch of a step: see Progress.
  void begin_op(const char* name, int layer = -1) {
    activity_->begin(name);
    progress_->begin_op(name, layer);
  }
  Progress& progress() { return *progress_; }
  // "rank 1 (GPU-…, GPU 1)"
  std::string label() const { return activity_->label(); }

 private:
  void loop();
  void start();
  void stop();
  void close();
  // Throws the exception in flight: itself, or as DeviceLost.
  [[noreturn]] void fail();

  const Priority priority_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<Activity> activity_;
  std::unique_ptr<Progress> progress_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::packaged_task<void()>> tasks_;
  bool closing_ = false;
  std::atomic<bool> waiting_ = false;  // a task is queued; read without the lock
  std::thread thread_;
};

// Waits for a future of Rank::run and rethrows its exception.
void wait(std::future<void>& task);

// Runs fn(rank) on all ranks at once, returns when all have ended, and rethrows the first failure.
void on_all(std::vector<std::unique_ptr<Rank>>& ranks, const std::function<void(Rank&)>& fn);

}  // namespace refit::cuda
