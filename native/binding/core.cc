#include "binding/core.h"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "binding/fields.h"
#include "core/library/cuda_library.h"

namespace refit::binding {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Core>> cores;
  int next = 1;
};

// It is never destroyed, because writer threads may still run and use it at process exit.
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
      device_(config_.device == "cuda" ? make_cuda_device(config_) : make_cpu_device(config_)),
      writer_("refit-writer"),
      beside_("refit-beside") {}

Core::~Core() { close(); }

void Core::with_device(const std::function<void(Device&)>& fn) {
  const std::lock_guard lock(device_mutex_);
  fn(*device_);
}

void Core::with_access(Access access, const std::function<void(Device&)>& fn) {
  if (access.beside) {
    fn(*device_);
  } else {
    with_device(fn);
  }
}

void Core::post(std::function<void()> job, Access access) {
  try {
    (access.beside ? beside_ : writer_).post(std::move(job));
  } catch (const std::runtime_error&) {
    throw std::runtime_error("the core is being closed");
  }
}

void Core::close() {
  beside_.join();
  writer_.join();
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

int core_handle_of(const Napi::CallbackInfo& info) {
  return static_cast<int>(to_integer(info[0], "handle", 0, kMaxInt));
}

std::shared_ptr<Core> core_of(const Napi::CallbackInfo& info) { return find_core(core_handle_of(info)); }

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
