// A core: one device and the thread that its weight operations run on. Cores belong to the process, not to a JavaScript
// environment: the scheduler's worker creates one, the main thread finds it by its handle.
#pragma once
#include <functional>
#include <memory>
#include <mutex>

#include "binding/job_thread.h"
#include "core/device.h"

namespace refit::binding {

class Core {
 public:
  // Throws what make_cpu_device or make_cuda_device throws.
  explicit Core(CoreConfig config);
  // Closes. Never on the writer thread itself, so jobs must not own their core.
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const CoreConfig& config() const { return config_; }
  const Device& device() const { return *device_; }
  // Runs fn with the device to itself. The gate keeps steps and writes apart; should it ever fail to, they take turns
  // here.
  void with_device(const std::function<void(Device&)>& fn);
  // For process groups: several work on it at once, and the gate keeps writes away, and steps from what is written.
  Device& shared_device() { return *device_; }

  // Queues a job for the writer thread; jobs run in order and must not throw. Throws std::runtime_error after close().
  void post(std::function<void()> job);
  // Takes no more jobs and returns when all that were posted have run.
  void close();

 private:
  const CoreConfig config_;
  std::unique_ptr<Device> device_;
  std::mutex device_mutex_;
  JobThread writer_;
};

// The registry. Any thread. `find` and `remove` throw std::invalid_argument for a handle that is not (or no longer)
// known.
int register_core(std::shared_ptr<Core> core);
std::shared_ptr<Core> find_core(int handle);
std::shared_ptr<Core> remove_core(int handle);

}  // namespace refit::binding
