// A core is one device and the threads that its weight operations run on. Cores belong to the process, not to a
// JavaScript environment: the scheduler's worker creates one, and the main thread finds it by its handle.
#pragma once
#include <functional>
#include <memory>
#include <mutex>

#include "binding/job_thread.h"
#include "binding/napi_setup.h"
#include "core/device.h"

namespace refit::binding {

class Core {
 public:
  // Throws the exceptions of make_cpu_device or make_cuda_device.
  explicit Core(CoreConfig config);
  // Closes the core. It must not run on the writer thread, so jobs must not own their core.
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const CoreConfig& config() const { return config_; }
  const Device& device() const { return *device_; }
  // Runs fn with exclusive use of the device. The gate keeps steps and writes apart. If the gate failed, they would
  // wait for each other here.
  void with_device(const std::function<void(Device&)>& fn);
  // For process groups: several of them use the device at once. The gate keeps writes away, and it keeps steps away
  // from memory that is being written.
  Device& shared_device() { return *device_; }

  // Queues a job for the writer thread, or for the thread of operations beside steps; jobs run in order and must not
  // throw. Throws std::runtime_error after close().
  void post(std::function<void()> job, Access access = {});
  // Runs fn for an operation on parameters: with exclusive use of the device unless it runs beside steps.
  void with_access(Access access, const std::function<void(Device&)>& fn);
  // Refuses further jobs and returns when all posted jobs have run.
  void close();

 private:
  const CoreConfig config_;
  std::unique_ptr<Device> device_;
  std::mutex device_mutex_;
  JobThread writer_, beside_;
};

// The registry. Any thread. `find` and `remove` throw std::invalid_argument for an unknown or closed handle.
int register_core(std::shared_ptr<Core> core);
std::shared_ptr<Core> find_core(int handle);
// The handle of a core that is the first argument, and its core.
int core_handle_of(const Napi::CallbackInfo& info);
std::shared_ptr<Core> core_of(const Napi::CallbackInfo& info);
std::shared_ptr<Core> remove_core(int handle);

}  // namespace refit::binding
