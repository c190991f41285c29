#include "cuda/device/rank.h"

#include "core/device.h"
#include "core/look.h"
#include "cuda/device/check.h"
#include "cuda/device/sticky.h"
#include "cuda/device/uuid.h"

namespace refit::cuda {
namespace {

// The next task often comes at once, so look for it before sleeping. A caller waits for its task through the copies of
// a whole model, so look longer there.
constexpr std::chrono::milliseconds kNext{2}, kDone{30};

}  // namespace

Rank::Rank(int index, int device, std::shared_ptr<Health> health, Priority priority)
    : index(index),
      device(device),
      priority_(priority),
      health_(health ? std::move(health) : std::make_shared<Health>()) {
  activity_ = health_->add("rank " + std::to_string(index) + " (GPU " + std::to_string(device) + ")");
  thread_ = quiet_thread("refit-rank-" + std::to_string(index), [this] { loop(); });
  try {
    run([this] { start(); }).get();
  } catch (...) {
    close();  // the destructor does not run after an exception
    throw;
  }
}

Rank::~Rank() { close(); }

void Rank::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Rank::start() {
  doing("start");
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
  activity_->rename("rank " + std::to_string(index) + " (" + uuid_text(prop.uuid) + ", GPU " + std::to_string(device) +
                    ")");
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  const int level = priority_ == Priority::kSteps ? greatest : least;
  // Non-blocking: no order between these streams and the legacy stream.
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, level), "cudaStreamCreate");
  check(cudaStreamCreateWithPriority(&copy, cudaStreamNonBlocking, level), "cudaStreamCreate");
  progress_ = std::make_unique<Progress>(index, stream);
  activity_->set_where([this] { return progress_->where(); });
}

void Rank::stop() {
  activity_->set_where(nullptr);
  doing("close its streams");
  progress_.reset();
  if (copy != nullptr) cudaStreamDestroy(copy);
  if (stream != nullptr) cudaStreamDestroy(stream);
  activity_->end();
}

std::future<void> Rank::run(std::function<void()> fn) {
  std::packaged_task<void()> task([this, fn = std::move(fn)] {
    struct Idle {
      Activity& activity;
      ~Idle() { activity.end(); }
    } idle{*activity_};
    doing("a task");
    try {
      fn();
    } catch (...) {
      fail();
    }
  });
  std::future<void> result = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    waiting_ = true;
  }
  wake_.notify_one();
  return result;
}

void Rank::fail() {
  std::string what = "an exception";
  try {
    throw;
  } catch (const DeviceLost& e) {
    health_->lose(e.what());
    throw;
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
  }
  // A GPU whose context is lost repeats its error on every call.
  cudaGetLastError();
  const cudaError_t again = stream == nullptr ? cudaSuccess : cudaStreamQuery(stream);
  cudaGetLastError();  // a runtime that keeps "not ready" would report it at the next launch
  if (!is_sticky(again)) {
    health_->note(label() + " failed: " + what);
    throw;
  }
  const std::string where = progress_ ? progress_->where() : "";
  const std::string message = label() + " is lost: " + cudaGetErrorName(again) + " (" + cudaGetErrorString(again) +
                              ") " + (where.empty() ? std::string("in ") + last_operation() : where) + "; noticed by " +
                              what;
  health_->lose(message);
  throw DeviceLost(message);
}

void Rank::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) break;
    {
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      waiting_ = !tasks_.empty();
      lock.unlock();
      task();
    }  // frees what the task holds outside the lock
    look_for(kNext, [this] { return waiting_.load(std::memory_order_relaxed); });
    lock.lock();
  }
  lock.unlock();
  stop();
}

void wait(std::future<void>& task) {
  look_for(kDone, [&] { return task.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  task.get();
}

void on_all(std::vector<std::unique_ptr<Rank>>& ranks, const std::function<void(Rank&)>& fn) {
  std::vector<std::future<void>> futures;
  std::exception_ptr first;
  try {
    for (auto& rank : ranks) futures.push_back(rank->run([&fn, &rank = *rank] { fn(rank); }));
  } catch (...) {
    first = std::current_exception();
  }
  // All tasks must have ended before anything that they refer to is destroyed.
  for (auto& future : futures) {
    try {
      wait(future);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace refit::cuda
