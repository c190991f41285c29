// The pending operations of one JavaScript environment (the main thread, or a worker) in cores and groups, and the way
// of their results back from other threads.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "binding/core.h"
#include "binding/napi_setup.h"

namespace refit::binding {

// Work of another thread for a promise. It owns native data only: it may be freed on any thread, and after its
// environment.
class Operation {
 public:
  virtual ~Operation() = default;
  // JavaScript thread: the value that the promise resolves to; `held` was passed to submit.
  virtual Napi::Value result(Napi::Env env, const std::vector<Napi::Reference<Napi::Value>>& held) = 0;

  // True if it uses memory of JavaScript objects: the environment then waits for it before it ends.
  bool borrows = false;
  // Set when it threw; the code is empty if the error has none (NativeErrorCode in src/native/addon.ts).
  std::string error, error_code;
};

// One operation on a core's writer thread, or on its thread of operations beside steps.
class Task : public Operation {
 public:
  // That thread: no N-API. An exception rejects the promise. `cancel` is set when the environment ends.
  virtual void run(Device& device, const std::atomic<bool>& cancel) = 0;

  Access access;
};

class EnvState {
 public:
  // Creates the environment's state (its instance data).
  static void attach(Napi::Env env);
  static EnvState& of(Napi::Env env);

  explicit EnvState(Napi::Env env);
  ~EnvState() = default;

  // JavaScript thread. Queues the task; `held` keeps JavaScript objects alive until it has ended.
  Napi::Promise submit(Napi::Env env, const std::shared_ptr<Core>& core, std::shared_ptr<Task> task,
                       std::vector<Napi::Reference<Napi::Value>> held);
  // The same for another thread: `post` queues the work for it. `owner` is kept until the promise settles, and dropped
  // on the JavaScript thread.
  using Job = std::function<void()>;
  Napi::Promise submit_to(Napi::Env env, const std::function<void(Job)>& post, std::shared_ptr<Operation> operation,
                          Job work, std::vector<Napi::Reference<Napi::Value>> held, std::shared_ptr<void> owner);

 private:
  // References may only be dropped on their JavaScript thread, so they stay here while the task goes to another thread.
  struct Pending {
    Napi::Promise::Deferred deferred;
    std::vector<Napi::Reference<Napi::Value>> held;
    std::shared_ptr<void> owner;
  };

  // A pending operation; also the payload of the call into JavaScript.
  struct Ticket {
    uint64_t id = 0;
    std::shared_ptr<Operation> operation;
  };

  static void call_js(Napi::Env env, Napi::Function callback, void* context, Ticket* ticket);
  using Tsfn = Napi::TypedThreadSafeFunction<void, Ticket, &EnvState::call_js>;

  // Shared with the writer threads; it outlives the environment while one of them holds it. After `closed` nothing
  // calls into JavaScript, and nothing starts to read its memory.
  struct Port {
    std::mutex mutex;
    std::condition_variable idle;
    bool closed = false;
    int borrowing = 0;
    std::atomic<bool> cancel = false;
    Tsfn tsfn;

    bool begin(const Operation& operation);
    void end(std::unique_ptr<Ticket> ticket);
  };

  // Environment cleanup hook, JavaScript thread: runs before the environment frees its buffers.
  static void shut(void* self);
  void settle(Napi::Env env, const Ticket& ticket);

  std::shared_ptr<Port> port_;
  std::unordered_map<uint64_t, Pending> pending_;
  uint64_t next_id_ = 1;
};

}  // namespace refit::binding
