#include "binding/env_state.h"

#include <exception>
#include <utility>

#include "binding/error_code.h"
#include "core/fault.h"

namespace refit::binding {

void EnvState::attach(Napi::Env env) { env.SetInstanceData(new EnvState(env)); }

EnvState& EnvState::of(Napi::Env env) { return *env.GetInstanceData<EnvState>(); }

EnvState::EnvState(Napi::Env env) : port_(std::make_shared<Port>()) {
  // The queue is unbounded, but each call in it belongs to a pending promise.
  port_->tsfn = Tsfn::New(env, "refit", 0, 1);
  // It keeps the process alive only while promises are pending.
  port_->tsfn.Unref(env);
  // Hooks run last in, first out: this one before the thread-safe function's own.
  napi_add_env_cleanup_hook(env, shut, this);
}

Napi::Promise EnvState::submit(Napi::Env env, const std::shared_ptr<Core>& core, std::shared_ptr<Task> task,
                               std::vector<Napi::Reference<Napi::Value>> held) {
  Core* const raw = core.get();  // the core's destructor joins its thread
  Task* const running = task.get();
  const auto work = [raw, running, port = port_] {
    raw->with_access(running->access, [&](Device& device) { running->run(device, port->cancel); });
  };
  const Access access = task->access;
  return submit_to(
      env, [raw, access](Job job) { raw->post(std::move(job), access); }, std::move(task), work, std::move(held),
      nullptr);
}

Napi::Promise EnvState::submit_to(Napi::Env env, const std::function<void(Job)>& post,
                                  std::shared_ptr<Operation> operation, Job work,
                                  std::vector<Napi::Reference<Napi::Value>> held, std::shared_ptr<void> owner) {
  const uint64_t id = next_id_++;
  post([port = port_, id, operation = std::move(operation), work = std::move(work)] {
    if (!port->begin(*operation)) return;
    try {
      work();
    } catch (const std::exception& e) {
      operation->error = e.what();
      operation->error_code = error_code(e);
    } catch (...) {
      operation->error = "a native exception was thrown";
    }
    port->end(std::unique_ptr<Ticket>(new Ticket{id, operation}));
  });
  if (pending_.empty()) port_->tsfn.Ref(env);
  auto deferred = Napi::Promise::Deferred::New(env);
  pending_.emplace(id, Pending{deferred, std::move(held), std::move(owner)});
  return deferred.Promise();
}

bool EnvState::Port::begin(const Operation& operation) {
  const std::lock_guard lock(mutex);
  if (closed) return false;
  if (operation.borrows) borrowing++;
  return true;
}

void EnvState::Port::end(std::unique_ptr<Ticket> ticket) {
  const std::lock_guard lock(mutex);
  // Notify under the lock: the waiter then frees the memory.
  if (ticket->operation->borrows && --borrowing == 0) idle.notify_all();
  if (closed) return;
  // Under the lock too, so that `shut` cannot release the function meanwhile. It never blocks: the queue has no bound.
  if (tsfn.NonBlockingCall(ticket.get()) == napi_ok) static_cast<void>(ticket.release());
}

void EnvState::call_js(Napi::Env env, Napi::Function, void*, Ticket* ticket) {
  const std::unique_ptr<Ticket> owned(ticket);
  if (static_cast<napi_env>(env) == nullptr) return;  // the environment is gone, and nothing waits
  EnvState::of(env).settle(env, *owned);
}

void EnvState::settle(Napi::Env env, const Ticket& ticket) {
  const auto found = pending_.find(ticket.id);
  if (found == pending_.end()) return;
  const Pending pending = std::move(found->second);
  pending_.erase(found);
  if (pending_.empty()) port_->tsfn.Unref(env);
  if (!ticket.operation->error.empty()) {
    pending.deferred.Reject(coded_error(env, ticket.operation->error, ticket.operation->error_code).Value());
    return;
  }
  try {
    pending.deferred.Resolve(ticket.operation->result(env, pending.held));
  } catch (const Napi::Error& e) {
    pending.deferred.Reject(e.Value());
  }
}

void EnvState::shut(void* self) {
  EnvState& state = *static_cast<EnvState*>(self);
  Port& port = *state.port_;
  {
    std::unique_lock lock(port.mutex);
    port.closed = true;
    port.cancel.store(true);
    static_cast<void>(REFIT_FAULT(kEnd));  // lets a test know that this point was reached
    port.idle.wait(lock, [&] { return port.borrowing == 0; });
  }
  state.pending_.clear();
  port.tsfn.Abort();
}

}  // namespace refit::binding
