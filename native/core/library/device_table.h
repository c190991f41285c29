// The library's side of core/library/device_library.h: the functions that are the same for every device. They throw
// nothing.
#pragma once
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "core/library/device_library.h"
#include "core/memory_error.h"

namespace refit::device_table {

inline void record(Failure& failure, FailureKind kind, const char* message) {
  failure.kind = kind;
  const size_t length = std::min(std::strlen(message), sizeof failure.message - 1);
  std::memcpy(failure.message, message, length);
  failure.message[length] = 0;
}

inline FailureKind failure_kind(GroupErrorKind kind) {
  switch (kind) {
    case GroupErrorKind::kTimeout:
      return FailureKind::kGroupTimeout;
    case GroupErrorKind::kBroken:
      return FailureKind::kGroupBroken;
    case GroupErrorKind::kRefused:
      return FailureKind::kGroupRefused;
    case GroupErrorKind::kSharedGpu:
      return FailureKind::kGroupSharedGpu;
    case GroupErrorKind::kNcclVersion:
      return FailureKind::kGroupNcclVersion;
  }
  return FailureKind::kOther;
}

template <typename F>
inline void guarded(Failure& failure, F&& fn) noexcept {
  try {
    fn();
  } catch (const DeviceLost& e) {
    record(failure, FailureKind::kDeviceLost, e.what());
  } catch (const GroupError& e) {
    record(failure, failure_kind(e.kind), e.what());
  } catch (const std::invalid_argument& e) {
    record(failure, FailureKind::kInvalidArgument, e.what());
  } catch (const NoMemory& e) {
    record(failure, FailureKind::kNoMemory, e.what());
  } catch (const std::bad_alloc&) {
    record(failure, FailureKind::kNoMemory, "not enough host memory");
  } catch (const std::exception& e) {
    record(failure, FailureKind::kOther, e.what());
  } catch (...) {
    record(failure, FailureKind::kOther, "a native exception was thrown in the CUDA library");
  }
}

inline void close(Device* device) noexcept { delete device; }

inline void info(const Device& device, Sink<DeviceInfo> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, device.info()); });
}

inline const void* address(const Device& device, int rank, int param, int set) noexcept {
  return device.address(rank, param, set);
}

inline void begin(Device& device, const StepBatch& batch, Failure& failure) noexcept {
  guarded(failure, [&] { device.begin(batch); });
}

inline void collect(Device& device, Sink<StepResult> sink, Failure& failure) noexcept {
  guarded(failure, [&] {
    StepResult result;
    device.collect(result);
    sink.take(sink.context, result);
  });
}

inline void write(Device& device, const WriteJob& job, Access access, Sink<WriteOutcome> sink,
                  Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, device.write(job, access)); });
}

inline void read(Device& device, int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols,
                 uint8_t* out, Access access, Failure& failure) noexcept {
  guarded(failure, [&] { device.read(rank, param, row, col, rows, cols, out, access); });
}

inline void checksum(Device& device, const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                     Access access, Sink<std::vector<uint64_t>> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, device.checksum(rects, tensor_cols, access)); });
}

inline void scramble(Device& device, uint64_t seed, int set, Failure& failure) noexcept {
  guarded(failure, [&] { device.scramble(seed, set); });
}

inline void copy_weights(Device& device, const std::vector<Rect>& rects, int from, int to, Failure& failure) noexcept {
  guarded(failure, [&] { device.copy_weights(rects, from, to); });
}

inline void drop_set(Device& device, int set, uint64_t& bytes, Failure& failure) noexcept {
  guarded(failure, [&] { bytes = device.drop_set(set); });
}

inline void restore_set(Device& device, int set, Failure& failure) noexcept {
  guarded(failure, [&] { device.restore_set(set); });
}

inline void release_memory(Device& device, uint32_t tags, bool keep_weights, uint64_t& bytes,
                           Failure& failure) noexcept {
  guarded(failure, [&] { bytes = device.release_memory(tags, keep_weights); });
}

inline void resume_memory(Device& device, uint32_t tags, bool& weights_kept, Failure& failure) noexcept {
  guarded(failure, [&] { weights_kept = device.resume_memory(tags); });
}

inline void close_mappings(Device& device, const std::string& name, Access access, uint64_t& closed,
                           Failure& failure) noexcept {
  guarded(failure, [&] { closed = device.close_mappings(name, access); });
}

inline void fetch(Device& device, const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out,
                  Failure& failure) noexcept {
  guarded(failure, [&] { device.fetch(segment, offset, bytes, timeout_ms, out); });
}

inline NcclGroup* group_open(Device& device, const NcclGroupOptions& options, Failure& failure) noexcept {
  NcclGroup* group = nullptr;
  guarded(failure, [&] { group = device.nccl_group(options).release(); });
  return group;
}

inline void group_close(NcclGroup* group) noexcept { delete group; }

inline void group_describe(const NcclGroup& group, Sink<std::string> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, group.describe()); });
}

inline void group_library(const NcclGroup& group, Sink<std::string> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, group.library()); });
}

inline void group_connect(NcclGroup& group, const uint8_t* id, GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.connect(id, deadline); });
}

inline void group_stage(NcclGroup& group, uint64_t bytes, int slots, Failure& failure) noexcept {
  guarded(failure, [&] { group.stage(bytes, slots); });
}

inline void group_staged(const NcclGroup& group, int slot, Sink<Source> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, group.staged(slot).source); });
}

inline void group_begin(NcclGroup& group, int slot, const std::vector<GroupPart>& parts, int root,
                        GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.begin(slot, parts, root, deadline); });
}

inline void group_arrive(NcclGroup& group, GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.arrive(deadline); });
}

inline void group_begin_messages(NcclGroup& group, int slot, const std::vector<NcclMessage>& messages,
                                 GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.begin_messages(slot, messages, deadline); });
}

inline void group_places(const NcclGroup& group, const std::vector<GroupPart>& parts,
                         const std::vector<Tensor>& tensors, const std::vector<Rect>& rects, int set,
                         Sink<std::vector<uint64_t>> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, group.places(parts, tensors, rects, set)); });
}

inline void group_receive_in_place(NcclGroup& group, const std::vector<GroupPart>& parts, int set, int root,
                                   GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.receive_in_place(parts, set, root, deadline); });
}

inline void group_read(NcclGroup& group, int slot, uint64_t offset, uint8_t* to, uint64_t bytes, GroupDeadline deadline,
                       Failure& failure) noexcept {
  guarded(failure, [&] {
    const std::vector<uint8_t> read = group.read(slot, offset, bytes, deadline);
    std::copy(read.begin(), read.end(), to);
  });
}

inline void group_send(NcclGroup& group, const uint8_t* data, uint64_t bytes, GroupDeadline deadline,
                       Failure& failure) noexcept {
  guarded(failure, [&] { group.send(data, bytes, deadline); });
}

inline void group_params(NcclGroup& group, Device& device, const CoreConfig& config, int rank, int set, int root,
                         GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.params(device, config, rank, set, root, deadline); });
}

inline void group_barrier(NcclGroup& group, GroupDeadline deadline, Failure& failure) noexcept {
  guarded(failure, [&] { group.barrier(deadline); });
}

inline void group_abort(NcclGroup& group, const std::string& reason) noexcept { group.abort(reason); }

inline void group_end(NcclGroup& group) noexcept { group.end(); }

inline void no_unique_id(const std::string&, uint8_t*, Failure& failure) noexcept {
  record(failure, FailureKind::kGroupRefused, "this CUDA library was built without NCCL");
}

// A table with the library's own functions as arguments.
constexpr DeviceLibrary make(decltype(DeviceLibrary::gpus) gpus, decltype(DeviceLibrary::memory_plan) memory_plan,
                             decltype(DeviceLibrary::open) open,
                             decltype(NcclGroupTable::unique_id) unique_id = no_unique_id) {
  return {kDeviceLibraryVersion,
          sizeof(DeviceLibrary),
          device_library_layout(),
          gpus,
          memory_plan,
          open,
          close,
          info,
          address,
          begin,
          collect,
          write,
          read,
          checksum,
          scramble,
          copy_weights,
          drop_set,
          restore_set,
          release_memory,
          resume_memory,
          close_mappings,
          fetch,
          {unique_id, group_open, group_close, group_describe, group_library, group_connect, group_stage, group_staged,
           group_begin, group_arrive, group_begin_messages, group_places, group_receive_in_place, group_read,
           group_send, group_params, group_barrier, group_abort, group_end}};
}

}  // namespace refit::device_table
