// Process groups (src/native/groups.ts): the registry of handles, the thread that each group waits on, and the
// functions that all kinds of groups have in common.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "binding/job_thread.h"
#include "binding/napi_setup.h"
#include "core/group.h"

namespace refit::binding {

// A group and the thread that its functions run on: they wait for other processes, so neither an event loop, nor
// libuv's pool, nor a core's writer thread may.
class GroupEntry {
 public:
  GroupEntry(std::unique_ptr<Group> group, bool gpu);
  // Aborts what was not ended. Never on the group's own thread.
  ~GroupEntry();
  GroupEntry(const GroupEntry&) = delete;
  GroupEntry& operator=(const GroupEntry&) = delete;

  Group& group() { return *group_; }
  // Slots are memory of GPUs, else of the host.
  bool gpu() const { return gpu_; }
  // Queues a job for the group's thread; must not throw. Throws std::runtime_error after close().
  void post(std::function<void()> job) { thread_.post(std::move(job)); }
  // Takes no more jobs; returns at once. Those that were posted still run.
  void close() { thread_.close(); }

 private:
  const std::unique_ptr<Group> group_;  // outlives the thread
  const bool gpu_;
  JobThread thread_;
};

// JavaScript thread: makes the group known, and aborts it when the environment ends. Returns its handle.
int register_group(Napi::Env env, std::unique_ptr<Group> group, bool gpu);
// Any thread. Both throw std::invalid_argument for a handle that is not (or no longer) known.
std::shared_ptr<GroupEntry> find_group(int handle);
std::shared_ptr<GroupEntry> group_of(const Napi::CallbackInfo& info);

// JavaScript thread. Runs `work` on the group's thread; what it throws rejects the promise (GroupErrorCode).
Napi::Value submit_to_group(Napi::Env env, const std::shared_ptr<GroupEntry>& entry, std::function<void()> work,
                            std::vector<Napi::Reference<Napi::Value>> held = {});
// `deadlineMs` from now.
GroupDeadline deadline_of(const Napi::Value& value);
// Of a group.
int to_slot(const Napi::Value& value);
int to_rank(const Napi::Value& value, const std::string& name);
// Float64Array of PART_FIELDS per part.
std::vector<GroupPart> parse_parts(const Napi::Value& value);

Napi::Value gloo_group(const Napi::CallbackInfo& info);
Napi::Value gloo_connect(const Napi::CallbackInfo& info);
Napi::Value stage_group(const Napi::CallbackInfo& info);
Napi::Value group_receive(const Napi::CallbackInfo& info);
Napi::Value group_read(const Napi::CallbackInfo& info);
Napi::Value group_send(const Napi::CallbackInfo& info);
Napi::Value group_params(const Napi::CallbackInfo& info);
Napi::Value group_barrier(const Napi::CallbackInfo& info);
void group_abort(const Napi::CallbackInfo& info);
Napi::Value end_group(const Napi::CallbackInfo& info);

}  // namespace refit::binding
