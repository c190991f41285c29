#include "binding/groups/groups.h"

#include <chrono>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "binding/config.h"
#include "binding/core.h"
#include "binding/env_state.h"
#include "binding/error_code.h"
#include "binding/fields.h"
#include "binding/row_layout.h"
#include "binding/weights/write_job.h"
#include "transport/gloo/gloo_group.h"

namespace refit::binding {
namespace {

using Held = std::vector<Napi::Reference<Napi::Value>>;

constexpr int64_t kMaxDeadlineMs = int64_t{1000} * 3600 * 24 * 365;
constexpr size_t kPartFields = PartRow::kNames.size();

struct GroupRegistry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<GroupEntry>> groups;
  int next = 1;
};

// Never destroyed: at process exit groups' threads may still run, and nothing that they use may be destroyed.
GroupRegistry& group_registry() {
  static GroupRegistry* const instance = new GroupRegistry;
  return *instance;
}

[[noreturn]] void unknown_group(int handle) {
  throw std::invalid_argument("no group has handle " + std::to_string(handle) + ": it was never made, or has ended");
}

std::shared_ptr<GroupEntry> remove_group(int handle) {
  GroupRegistry& all = group_registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.groups.find(handle);
  if (found == all.groups.end()) unknown_group(handle);
  std::shared_ptr<GroupEntry> entry = std::move(found->second);
  all.groups.erase(found);
  return entry;
}

// Environment cleanup hook. Hooks run last in, first out, so this runs before EnvState::shut, which waits for groups
// that read JavaScript's memory.
void abort_at_exit(void* handle) {
  try {
    remove_group(static_cast<int>(reinterpret_cast<intptr_t>(handle)))->group().abort("this process ends");
  } catch (const std::invalid_argument&) {
    // It has ended already.
  }
}

void* hook_argument(int handle) { return reinterpret_cast<void*>(static_cast<intptr_t>(handle)); }

class GroupOperation : public Operation {
 public:
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }
};

// Reads are small, so the result is a copy.
constexpr int64_t kMaxGroupRead = int64_t{1} << 30;

class ReadOperation : public Operation {
 public:
  Napi::Value result(Napi::Env env, const Held&) override { return from_vector(env, bytes); }

  std::vector<uint8_t> bytes;
};

int group_handle_of(const Napi::CallbackInfo& info) {
  return static_cast<int>(to_integer(info[0], "group", 0, kMaxInt));
}

GlooGroup& gloo_of(GroupEntry& entry) {
  auto* const group = dynamic_cast<GlooGroup*>(&entry.group());
  if (group == nullptr) throw std::invalid_argument("expected a gloo group, got " + entry.group().describe());
  return *group;
}

}  // namespace

GroupEntry::GroupEntry(std::unique_ptr<Group> group, bool gpu)
    : group_(std::move(group)), gpu_(gpu), thread_("refit-group") {}

GroupEntry::~GroupEntry() {
  group_->abort("it is given up");
  thread_.join();
}

int register_group(Napi::Env env, std::unique_ptr<Group> group, bool gpu) {
  auto entry = std::make_shared<GroupEntry>(std::move(group), gpu);
  GroupRegistry& all = group_registry();
  int handle = 0;
  {
    const std::lock_guard lock(all.mutex);
    handle = all.next++;
    all.groups.emplace(handle, std::move(entry));
  }
  napi_add_env_cleanup_hook(env, abort_at_exit, hook_argument(handle));
  return handle;
}

std::shared_ptr<GroupEntry> find_group(int handle) {
  GroupRegistry& all = group_registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.groups.find(handle);
  if (found == all.groups.end()) unknown_group(handle);
  return found->second;
}

std::shared_ptr<GroupEntry> group_of(const Napi::CallbackInfo& info) { return find_group(group_handle_of(info)); }

Napi::Value submit_to_group(Napi::Env env, const std::shared_ptr<GroupEntry>& entry, std::function<void()> work,
                            Held held) {
  auto operation = std::make_shared<GroupOperation>();
  operation->borrows = !held.empty();
  GroupEntry* const raw = entry.get();
  return EnvState::of(env).submit_to(
      env, [raw](EnvState::Job job) { raw->post(std::move(job)); }, std::move(operation), std::move(work),
      std::move(held), entry);
}

GroupDeadline deadline_of(const Napi::Value& value) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(to_integer(value, "deadlineMs", 0, kMaxDeadlineMs));
}

int to_slot(const Napi::Value& value) { return static_cast<int>(to_integer(value, "slot", 0, kGroupSlots - 1)); }

int to_rank(const Napi::Value& value, const std::string& name) {
  return static_cast<int>(to_integer(value, name, 0, kMaxRank));
}

std::vector<GroupPart> parse_parts(const Napi::Value& value) {
  const Napi::Env env = value.Env();
  const auto numbers = to_span<double>(value, "parts");
  if (numbers.size() % kPartFields != 0) {
    throw Napi::RangeError::New(env, "parts: expected a multiple of " + std::to_string(kPartFields) + " entries, got " +
                                         std::to_string(numbers.size()));
  }
  std::vector<GroupPart> parts(numbers.size() / kPartFields);
  for (size_t i = 0; i < parts.size(); i++) {
    const double* at = numbers.data() + i * kPartFields;
    parts[i].offset = static_cast<uint64_t>(exact_integer(env, at[PartRow::kOffset], kMaxSafe, "parts", i, "offset"));
    parts[i].bytes = static_cast<uint64_t>(exact_integer(env, at[PartRow::kBytes], kMaxSafe, "parts", i, "bytes"));
  }
  return parts;
}

std::vector<std::array<int64_t, MessageRow::kNames.size()>> parse_messages(const Napi::Value& value) {
  constexpr size_t kFields = MessageRow::kNames.size();
  constexpr std::array<int64_t, kFields> kMost{kMaxRank, kMaxRank, kMaxInt, kMaxInt, kMaxSafe, kMaxSafe};
  const Napi::Env env = value.Env();
  const auto numbers = to_span<double>(value, "messages");
  if (numbers.size() % kFields != 0) {
    throw Napi::RangeError::New(env, "messages: expected a multiple of " + std::to_string(kFields) + " entries, got " +
                                         std::to_string(numbers.size()));
  }
  std::vector<std::array<int64_t, kFields>> rows(numbers.size() / kFields);
  for (size_t i = 0; i < rows.size(); i++) {
    for (size_t field = 0; field < kFields; field++) {
      rows[i][field] =
          exact_integer(env, numbers[i * kFields + field], kMost[field], "messages", i, MessageRow::kNames[field]);
    }
  }
  return rows;
}

Napi::Value gloo_group(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Object options = to_object(info[0], "options");
  const int size = static_cast<int>(to_integer(options.Get("size"), "options.size", 1, kMaxRank));
  const Napi::Array list = to_array(options.Get("ranks"), "options.ranks");
  std::vector<int> ranks;
  for (uint32_t i = 0; i < list.Length(); i++) {
    ranks.push_back(to_rank(list[i], "options.ranks[" + std::to_string(i) + "]"));
  }
  const std::string host = to_string(options.Get("host"), "options.host");
  return with_error_code(env, [&]() -> Napi::Value {
    auto group = std::make_unique<GlooGroup>(size, ranks, host);
    Napi::Array addresses = Napi::Array::New(env, ranks.size());
    for (uint32_t i = 0; i < ranks.size(); i++) addresses.Set(i, from_vector(env, group->address(ranks[i])));
    Napi::Object out = Napi::Object::New(env);
    out.Set("group", register_group(env, std::move(group), false));
    out.Set("addresses", addresses);
    return out;
  });
}

Napi::Value gloo_connect(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  GlooGroup& group = gloo_of(*entry);
  const Napi::Array list = to_array(info[1], "peers");
  std::vector<std::vector<uint8_t>> peers;
  for (uint32_t i = 0; i < list.Length(); i++) {
    const auto bytes = to_span<uint8_t>(list[i], "peers[" + std::to_string(i) + "]");
    peers.emplace_back(bytes.begin(), bytes.end());
  }
  const GroupDeadline deadline = deadline_of(info[2]);
  return submit_to_group(info.Env(), entry,
                         [&group, peers = std::move(peers), deadline] { group.connect(peers, deadline); });
}

Napi::Value stage_group(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  const auto bytes = static_cast<uint64_t>(to_integer(info[1], "bytes", 0, kMaxSafe));
  const auto slots = static_cast<int>(to_integer(info[2], "slots", 1, kGroupSlots));
  return submit_to_group(info.Env(), entry, [&group = entry->group(), bytes, slots] { group.stage(bytes, slots); });
}

Napi::Value group_receive(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  const int slot = to_slot(info[1]);
  std::vector<GroupPart> parts = parse_parts(info[2]);
  const int root = to_rank(info[3], "root");
  const GroupDeadline deadline = deadline_of(info[4]);
  return submit_to_group(env, entry, [&group = entry->group(), slot, parts = std::move(parts), root, deadline] {
    group.receive(slot, parts, root, deadline);
  });
}

Napi::Value group_receive_messages(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  GlooGroup& group = gloo_of(*entry);
  const int slot = to_slot(info[1]);
  std::vector<gloo::Message> messages;
  std::vector<GroupPart> parts;
  for (const auto& row : parse_messages(info[2])) {
    if (row[MessageRow::kInto] != 0) throw Napi::RangeError::New(env, "messages: gloo receives into slots alone");
    messages.push_back({static_cast<int>(row[MessageRow::kMine]),
                        static_cast<int>(row[MessageRow::kOther]),
                        static_cast<uint32_t>(row[MessageRow::kTag]),
                        {}});
    parts.push_back({static_cast<uint64_t>(row[MessageRow::kOffset]), static_cast<uint64_t>(row[MessageRow::kBytes])});
  }
  const GroupDeadline deadline = deadline_of(info[3]);
  return submit_to_group(env, entry,
                         [&group, slot, messages = std::move(messages), parts = std::move(parts), deadline] {
                           group.receive_messages(slot, messages, parts, deadline);
                         });
}

Napi::Value group_read(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  const int slot = to_slot(info[1]);
  const auto offset = static_cast<uint64_t>(to_integer(info[2], "offset", 0, kMaxSafe));
  const auto bytes = static_cast<uint64_t>(to_integer(info[3], "bytes", 0, kMaxGroupRead));
  const GroupDeadline deadline = deadline_of(info[4]);
  auto operation = std::make_shared<ReadOperation>();
  ReadOperation* const to = operation.get();
  GroupEntry* const raw = entry.get();
  return EnvState::of(env).submit_to(
      env, [raw](EnvState::Job job) { raw->post(std::move(job)); }, std::move(operation),
      [raw, to, slot, offset, bytes, deadline] { to->bytes = raw->group().read(slot, offset, bytes, deadline); }, {},
      entry);
}

Napi::Value group_send(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  const auto bytes = fixed_bytes(info[1], "bytes");
  const GroupDeadline deadline = deadline_of(info[2]);
  Held held;
  held.push_back(Napi::Reference<Napi::Value>::New(info[1], 1));
  return submit_to_group(
      info.Env(), entry,
      [&group = entry->group(), bytes, deadline] { group.send(bytes.data(), bytes.size(), deadline); },
      std::move(held));
}

Napi::Value group_params(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  const auto core = find_core(static_cast<int>(to_integer(info[1], "core", 0, kMaxInt)));
  const int rank = static_cast<int>(to_integer(info[2], "rank", 0, core->config().ranks - 1));
  const int root = to_rank(info[3], "root");
  const GroupDeadline deadline = deadline_of(info[4]);
  const int set = info[5].IsUndefined() ? 0 : to_set(info[5], "set", core->config());
  return submit_to_group(info.Env(), entry, [&group = entry->group(), core, rank, set, root, deadline] {
    // Without exclusive use of the device: groups of other ranks run at the same time, and their peers in another
    // order, so none may wait for another. A sender from host memory keeps computing.
    group.params(core->shared_device(), core->config(), rank, set, root, deadline);
  });
}

Napi::Value group_barrier(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  const GroupDeadline deadline = deadline_of(info[1]);
  return submit_to_group(info.Env(), entry, [&group = entry->group(), deadline] { group.barrier(deadline); });
}

void group_abort(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  entry->group().abort(to_string(info[1], "reason"));
}

Napi::Value end_group(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const int handle = group_handle_of(info);
  const bool abort = to_boolean(info[1], "abort");
  const auto entry = remove_group(handle);
  napi_remove_env_cleanup_hook(env, abort_at_exit, hook_argument(handle));
  if (abort) entry->group().abort("the group is ended");
  const Napi::Value ended = submit_to_group(env, entry, [&group = entry->group()] { group.end(); });
  entry->close();
  return ended;
}

}  // namespace refit::binding
