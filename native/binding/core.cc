#include "binding/core.h"

#include <pthread.h>
#include <signal.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/cuda_library.h"

namespace refit::binding {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Core>> cores;
  int next = 1;
};

// Never destroyed: at process exit writer threads may still run, and nothing may be torn down under them.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

[[noreturn]] void unknown(int handle) {
  throw std::invalid_argument("no core has handle " + std::to_string(handle) + ": it was never created, or closed");
}

}  // namespace

Core::Core(CoreConfig config)
    : config_(std::move(config)),
      device_(config_.device == "cuda" ? make_cuda_device(config_) : make_cpu_device(config_)) {
  // Signals belong to the host program's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    writer_ = std::thread([this] { run_jobs(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(writer_.native_handle(), "refit-writer");
}

Core::~Core() { close(); }

void Core::with_device(const std::function<void(Device&)>& fn) {
  const std::lock_guard lock(device_mutex_);
  fn(*device_);
}

void Core::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("the core is being closed");
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void Core::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  // Of two callers both return only when the thread has ended.
  std::call_once(joined_, [this] { writer_.join(); });
}

void Core::run_jobs() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what it holds is freed here, not under the lock
    lock.lock();
  }
}

int register_core(std::shared_ptr<Core> core) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const int handle = all.next++;
  all.cores.emplace(handle, std::move(core));
  return handle;
}

std::shared_ptr<Core> find_core(int handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.cores.find(handle);
  if (found == all.cores.end()) unknown(handle);
  return found->second;
}

std::shared_ptr<Core> remove_core(int handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.cores.find(handle);
  if (found == all.cores.end()) unknown(handle);
  std::shared_ptr<Core> core = std::move(found->second);
  all.cores.erase(found);
  return core;
}

}  // namespace refit::binding
