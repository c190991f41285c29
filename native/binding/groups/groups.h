// Process groups (src/native/groups.ts): the registry of handles, the thread that each group waits on, and the
// functions that all kinds of groups share.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "binding/job_thread.h"
#include "binding/napi_setup.h"
#include "binding/row_layout.h"
#include "core/group.h"

namespace refit::binding {

// Most ranks of a group.
constexpr int kMaxRank = 0xffff;

// A group and the thread that its functions run on. They wait for other processes, so they may not run on an event
// loop, in libuv's pool or on a core's writer thread.
class GroupEntry {
 public:
  GroupEntry(std::unique_ptr<Group> group, bool gpu);
  // Aborts pending calls. Never call it on the group's own thread.
  ~GroupEntry();
  GroupEntry(const GroupEntry&) = delete;
  GroupEntry& operator=(const GroupEntry&) = delete;

  Group& group() { return *group_; }
  // True: slots are memory of GPUs; false: of the host.
  bool gpu() const { return gpu_; }
  // Queues a job for the group's thread; it must not throw. Throws std::runtime_error after close().
  void post(std::function<void()> job) { thread_.post(std::move(job)); }
  // Takes no more jobs and returns at once. Posted jobs still run.
  void close() { thread_.close(); }

 private:
  const std::unique_ptr<Group> group_;  // outlives the thread
  const bool gpu_;
  JobThread thread_;
};

// JavaScript thread: registers the group, and aborts it when the environment ends. Returns its handle.
int register_group(Napi::Env env, std::unique_ptr<Group> group, bool gpu);
// Any thread. Both throw std::invalid_argument for an unknown or ended handle.
std::shared_ptr<GroupEntry> find_group(int handle);
std::shared_ptr<GroupEntry> group_of(const Napi::CallbackInfo& info);

// JavaScript thread. Runs `work` on the group's thread; an exception rejects the promise (GroupErrorCode).
Napi::Value submit_to_group(Napi::Env env, const std::shared_ptr<GroupEntry>& entry, std::function<void()> work,
                            std::vector<Napi::Reference<Napi::Value>> held = {});
// Now plus `deadlineMs`.
GroupDeadline deadline_of(const Napi::Value& value);
// The index of a staging slot.
int to_slot(const Napi::Value& value);
int to_rank(const Napi::Value& value, const std::string& name);
// Float64Array of PART_FIELDS per part.
std::vector<GroupPart> parse_parts(const Napi::Value& value);
// Float64Array of MESSAGE_FIELDS per message: by MessageRow::Field.
std::vector<std::array<int64_t, MessageRow::kNames.size()>> parse_messages(const Napi::Value& value);

Napi::Value gloo_group(const Napi::CallbackInfo& info);
Napi::Value gloo_connect(const Napi::CallbackInfo& info);
Napi::Value stage_group(const Napi::CallbackInfo& info);
Napi::Value group_receive(const Napi::CallbackInfo& info);
Napi::Value group_receive_messages(const Napi::CallbackInfo& info);
Napi::Value group_read(const Napi::CallbackInfo& info);
Napi::Value group_send(const Napi::CallbackInfo& info);
Napi::Value group_params(const Napi::CallbackInfo& info);
Napi::Value group_barrier(const Napi::CallbackInfo& info);
void group_abort(const Napi::CallbackInfo& info);
Napi::Value end_group(const Napi::CallbackInfo& info);

}  // namespace refit::binding
