// Reads pickled lists of (name, CUDA tensor) into columns. torch's senders write such lists
// (torch.multiprocessing.reductions, reduce_tensor) for row-major weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "codec/pickle_machine.h"
#include "core/dtype.h"

namespace refit {

// The meaning of a global name in such a list. The closed set of names is src/wire/torch/names.ts; the numbers are
// those of HANDLE_ROLES in src/native/handles.ts.
enum class HandleRole : uint8_t {
  kUnknown,
  kRebuild,  // a function that rebuilds a CUDA tensor
  kTuple,    // a subclass of tuple
  // The others are values.
  kTensorClass,
  kStorageClass,
  // The first dtype; the others follow in the order of DType.
  kDType
};
constexpr int kHandleRoles = static_cast<int>(HandleRole::kDType) + static_cast<int>(kDTypes);

constexpr HandleRole role_of(DType dtype) {
  return static_cast<HandleRole>(static_cast<uint8_t>(HandleRole::kDType) + static_cast<uint8_t>(dtype));
}

using FindRole = std::function<HandleRole(std::string_view module, std::string_view name)>;

// A GPU as its sender names it: by the sender's own index, or as text.
using SenderDevice = std::variant<int64_t, std::string>;

struct HandleSegment {
  size_t device;  // index
  std::string handle;
  // The largest end of its storages, in bytes of the segment.
  uint64_t end;
  // 64 bytes each, without duplicates. They must be done before the first read.
  std::vector<std::string> events;
};

struct HandleCounter {
  std::string file;
  // One for each storage.
  std::vector<int32_t> slots;
};

struct HandleList {
  // One entry per tensor, in order. Names are concatenated; `name_ends` holds the end of each.
  std::string names;
  std::vector<int32_t> name_ends;
  std::vector<uint8_t> dtypes;  // values of DType
  std::vector<uint8_t> dims;
  std::vector<double> sizes;  // all shapes, concatenated
  std::vector<int32_t> segments;
  std::vector<double> offsets;  // bytes into the segment

  // The number of tensors up to the end of each pickle.
  std::vector<int32_t> ends;
  std::vector<SenderDevice> devices;
  std::vector<HandleSegment> segment_list;
  std::vector<HandleCounter> counters;
};

// Reads pickles that have no storage in common. Returns nothing if a pickle is wrong or contains anything else (views,
// empty tensors, other dtypes, other memory, names that are not ASCII). src/wire/torch/body.ts then reads the payload:
// it reads all kinds, makes every check that is made here, and reports errors. The caller checks the contents of
// handles, devices and counter file names.
std::optional<HandleList> read_handle_list(std::span<const std::span<const uint8_t>> pickles,
                                           const FindRole& find_role);

}  // namespace refit
