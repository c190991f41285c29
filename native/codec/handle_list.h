// Reads pickled lists of (name, CUDA tensor) into columns: what torch's senders write
// (torch.multiprocessing.reductions, reduce_tensor) for weights that lie row-major in storages of their own.
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
  // The others stand for themselves.
  kTensorClass,
  kStorageClass,
  kBfloat16,
  kFloat16,
  kFloat32
};
constexpr int kHandleRoles = 8;

using FindRole = std::function<HandleRole(std::string_view module, std::string_view name)>;

// A GPU as its sender names it: by an index of its own, or as text.
using SenderDevice = std::variant<int64_t, std::string>;

struct HandleSegment {
  size_t device;  // index
  std::string handle;
  // Bytes of the segment that its storages reach into.
  uint64_t end;
  // 64 bytes each, without duplicates: to be waited for before the first read.
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

  // How many tensors there are up to the end of each pickle.
  std::vector<int32_t> ends;
  std::vector<SenderDevice> devices;
  std::vector<HandleSegment> segment_list;
  std::vector<HandleCounter> counters;
};

// Reads pickles that name no storage in common. Returns nothing where a pickle is wrong or holds anything else (views,
// empty tensors, other dtypes, other memory, names that are not ASCII): src/wire/torch/body.ts reads all payloads and
// reports what is wrong. Every check here is made there too. The caller checks the contents of handles, devices and
// counter file names.
std::optional<HandleList> read_handle_list(std::span<const std::span<const uint8_t>> pickles,
                                           const FindRole& find_role);

}  // namespace refit
