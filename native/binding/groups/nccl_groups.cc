#include "binding/groups/nccl_groups.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "binding/core.h"
#include "binding/error_code.h"
#include "binding/fields.h"
#include "binding/groups/groups.h"
#include "binding/weights/write_job.h"
#include "core/library/cuda_library.h"
#include "core/write/places.h"
#include "core/write/write_check.h"
#include "transport/nccl/nccl_group.h"

namespace refit::binding {
namespace {

// A group that keeps its core alive, because the core's device must outlive it.
class CoreGroup : public NcclGroup {
 public:
  CoreGroup(std::shared_ptr<Core> core, const NcclGroupOptions& options)
      : core_(std::move(core)), group_(core_->shared_device().nccl_group(options)) {}

  std::string describe() const override { return group_->describe(); }
  std::string library() const override { return group_->library(); }
  void connect(const uint8_t* id, GroupDeadline deadline) override { group_->connect(id, deadline); }
  void stage(uint64_t bytes, int slots = kGroupSlots) override { group_->stage(bytes, slots); }
  StagedSlot staged(int slot) const override { return group_->staged(slot); }
  void begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) override {
    group_->begin(slot, parts, root, deadline);
  }
  void arrive(GroupDeadline deadline) override { group_->arrive(deadline); }
  void begin_messages(int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline) override {
    group_->begin_messages(slot, messages, deadline);
  }
  // Checks the whole job, as `write` checks the staged part of it: pieces that do not overlap within one call may
  // overlap between two.
  std::vector<uint64_t> places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                               const std::vector<Rect>& rects, int set) const override {
    WriteJob job;
    job.sources.emplace_back();
    for (const GroupPart& part : parts) {
      job.sources[0].bytes = std::max(job.sources[0].bytes, part.offset + part.bytes);
    }
    job.tensors = tensors;
    job.rects = rects;
    check_write(job, core_->config().ranks, core_->config().params);
    return group_->places(parts, tensors, rects, set);
  }
  void receive_in_place(const std::vector<GroupPart>& parts, int set, int root, GroupDeadline deadline) override {
    group_->receive_in_place(parts, set, root, deadline);
  }
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) override {
    return group_->read(slot, offset, bytes, deadline);
  }
  void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) override {
    group_->send(data, bytes, deadline);
  }
  void params(Device& device, const CoreConfig& config, int rank, int set, int root, GroupDeadline deadline) override {
    group_->params(device, config, rank, set, root, deadline);
  }
  void barrier(GroupDeadline deadline) override { group_->barrier(deadline); }
  void abort(const std::string& reason) noexcept override { group_->abort(reason); }
  void end() noexcept override { group_->end(); }

 private:
  const std::shared_ptr<Core> core_;
  const std::unique_ptr<NcclGroup> group_;  // destroyed first
};

NcclGroup& nccl_of(GroupEntry& entry) {
  auto* const group = dynamic_cast<NcclGroup*>(&entry.group());
  if (group == nullptr) throw std::invalid_argument("expected a group of NCCL, got " + entry.group().describe());
  return *group;
}

std::string optional_string(const Napi::Value& value, const std::string& name) {
  return value.IsUndefined() ? std::string() : to_string(value, name);
}

}  // namespace

Napi::Value nccl_group(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto core = find_core(static_cast<int>(to_integer(info[0], "core", 0, kMaxInt)));
  const Napi::Object from = to_object(info[1], "options");
  NcclGroupOptions options;
  options.size = static_cast<int>(to_integer(from.Get("size"), "options.size", 1, kMaxRank));
  options.first_rank = static_cast<int>(to_integer(from.Get("firstRank"), "options.firstRank", 0, kMaxRank));
  options.library = optional_string(from.Get("library"), "options.library");
  if (const Napi::Value only = from.Get("coreRank"); !only.IsUndefined()) {
    options.core_rank = static_cast<int>(to_integer(only, "options.coreRank", 0, core->config().ranks - 1));
  }
  if (const Napi::Value warm_up = from.Get("warmUp"); !warm_up.IsUndefined()) {
    options.warm_up = to_boolean(warm_up, "options.warmUp");
  }
  if (const Napi::Value peers = from.Get("peerGpus"); !peers.IsUndefined()) {
    const Napi::Array list = to_array(peers, "options.peerGpus");
    for (uint32_t i = 0; i < list.Length(); i++) {
      options.peer_gpus.push_back(to_string(list[i], "options.peerGpus[" + std::to_string(i) + "]"));
    }
  }
  return with_error_code(env, [&]() -> Napi::Value {
    auto group = std::make_unique<CoreGroup>(std::move(core), options);
    return Napi::Number::New(env, register_group(env, std::move(group), true));
  });
}

Napi::Value nccl_library(const Napi::CallbackInfo& info) {
  return Napi::String::New(info.Env(), nccl_of(*group_of(info)).library());
}

Napi::Value nccl_unique_id(const Napi::CallbackInfo& info) {
  const std::string library = optional_string(info[0], "library");
  return with_error_code(info.Env(), [&] { return from_vector(info.Env(), refit::nccl_unique_id(library)); });
}

Napi::Value nccl_connect(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  const auto bytes = to_span<uint8_t>(info[1], "uniqueId");
  if (bytes.size() != NcclGroup::kIdBytes) {
    throw Napi::RangeError::New(env, "uniqueId: expected " + std::to_string(NcclGroup::kIdBytes) + " bytes, got " +
                                         std::to_string(bytes.size()));
  }
  const GroupDeadline deadline = deadline_of(info[2]);
  return submit_to_group(env, entry, [&group, id = std::vector<uint8_t>(bytes.begin(), bytes.end()), deadline] {
    group.connect(id.data(), deadline);
  });
}

Napi::Value group_places(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  const std::vector<GroupPart> parts = parse_parts(info[1]);
  const std::vector<Tensor> tensors = parse_tensors(info[2], "tensors");
  const std::vector<Rect> rects = parse_rects(info[3], "rects");
  const int set = info[4].IsUndefined() ? 0 : static_cast<int>(to_integer(info[4], "set", 0, kMostSets - 1));
  return with_error_code(env, [&]() -> Napi::Value {
    const std::vector<uint64_t> places = group.places(parts, tensors, rects, set);
    Napi::Float64Array out = Napi::Float64Array::New(env, places.size());
    for (size_t i = 0; i < places.size(); i++) out[i] = places[i] == kNoPlace ? -1 : static_cast<double>(places[i]);
    return out;
  });
}

Napi::Value group_begin(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  const int slot = to_slot(info[1]);
  std::vector<GroupPart> parts = parse_parts(info[2]);
  const int root = to_rank(info[3], "root");
  const GroupDeadline deadline = deadline_of(info[4]);
  return submit_to_group(info.Env(), entry, [&group, slot, parts = std::move(parts), root, deadline] {
    group.begin(slot, parts, root, deadline);
  });
}

Napi::Value group_arrive(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  const GroupDeadline deadline = deadline_of(info[1]);
  return submit_to_group(info.Env(), entry, [&group, deadline] { group.arrive(deadline); });
}

Napi::Value group_begin_messages(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  const int slot = to_slot(info[1]);
  const int set = info[4].IsUndefined() ? 0 : static_cast<int>(to_integer(info[4], "set", 0, kMostSets - 1));
  std::vector<NcclMessage> messages;
  for (const auto& row : parse_messages(info[2])) {
    const int into = static_cast<int>(row[MessageRow::kInto]);
    messages.push_back({static_cast<int>(row[MessageRow::kMine]), static_cast<int>(row[MessageRow::kOther]), into - 1,
                        static_cast<uint64_t>(row[MessageRow::kOffset]), static_cast<uint64_t>(row[MessageRow::kBytes]),
                        set});
  }
  const GroupDeadline deadline = deadline_of(info[3]);
  return submit_to_group(env, entry, [&group, slot, messages = std::move(messages), deadline] {
    group.begin_messages(slot, messages, deadline);
  });
}

Napi::Value group_receive_in_place(const Napi::CallbackInfo& info) {
  const auto entry = group_of(info);
  NcclGroup& group = nccl_of(*entry);
  std::vector<GroupPart> parts = parse_parts(info[1]);
  const int root = to_rank(info[2], "root");
  const GroupDeadline deadline = deadline_of(info[3]);
  const int set = info[4].IsUndefined() ? 0 : to_integer(info[4], "set", 0, kMostSets - 1);
  return submit_to_group(info.Env(), entry, [&group, parts = std::move(parts), set, root, deadline] {
    group.receive_in_place(parts, set, root, deadline);
  });
}

}  // namespace refit::binding
