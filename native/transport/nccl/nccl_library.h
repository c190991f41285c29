// Process groups in the table of core/library/device_library.h: the functions across the boundary, and the addon's
// side.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/library/library_call.h"

namespace refit {

// All report errors through `failure`, whose kind is kNone on entry.
struct NcclGroupTable {
  // Writes NcclGroup::kIdBytes.
  void (*unique_id)(const std::string& library, uint8_t* id, Failure& failure) noexcept;
  // Null on failure.
  NcclGroup* (*open)(Device& device, const NcclGroupOptions& options, Failure& failure) noexcept;
  void (*close)(NcclGroup* group) noexcept;
  void (*describe)(const NcclGroup& group, Sink<std::string> sink, Failure& failure) noexcept;
  void (*library)(const NcclGroup& group, Sink<std::string> sink, Failure& failure) noexcept;
  void (*connect)(NcclGroup& group, const uint8_t* id, GroupDeadline deadline, Failure& failure) noexcept;
  void (*stage)(NcclGroup& group, uint64_t bytes, int slots, Failure& failure) noexcept;
  void (*staged)(const NcclGroup& group, int slot, Sink<Source> sink, Failure& failure) noexcept;
  void (*begin)(NcclGroup& group, int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline,
                Failure& failure) noexcept;
  void (*arrive)(NcclGroup& group, GroupDeadline deadline, Failure& failure) noexcept;
  void (*begin_messages)(NcclGroup& group, int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline,
                         Failure& failure) noexcept;
  void (*places)(const NcclGroup& group, const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                 const std::vector<Rect>& rects, int set, Sink<std::vector<uint64_t>> sink, Failure& failure) noexcept;
  void (*receive_in_place)(NcclGroup& group, const std::vector<GroupPart>& parts, int set, int root,
                           GroupDeadline deadline, Failure& failure) noexcept;
  void (*read)(NcclGroup& group, int slot, uint64_t offset, uint8_t* to, uint64_t bytes, GroupDeadline deadline,
               Failure& failure) noexcept;
  void (*send)(NcclGroup& group, const uint8_t* data, uint64_t bytes, GroupDeadline deadline,
               Failure& failure) noexcept;
  void (*params)(NcclGroup& group, Device& device, const CoreConfig& config, int rank, int set, int root,
                 GroupDeadline deadline, Failure& failure) noexcept;
  void (*barrier)(NcclGroup& group, GroupDeadline deadline, Failure& failure) noexcept;
  void (*abort)(NcclGroup& group, const std::string& reason) noexcept;
  void (*end)(NcclGroup& group) noexcept;
};

// A group that the library owns. `addon_device`: the addon's object for `device`.
std::unique_ptr<NcclGroup> open_library_group(const NcclGroupTable& table, Device& addon_device, Device& device,
                                              const NcclGroupOptions& options);

}  // namespace refit
