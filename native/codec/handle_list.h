// Lists of (name, tensor of a card) out of pickles, as columns: what torch's senders write
// (torch.multiprocessing.reductions, reduce_tensor) for weights that lie row-major in shares of their own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "codec/pickle_machine.h"
#include "core/dtype.h"

namespace refit {

// A card as its sender calls it: a number of its own, or text.
using SenderDevice = std::variant<int64_t, std::string>;

struct HandleSegment {
  size_t device;  // index
  std::string handle;
  // Bytes that its storages reach into it.
  uint64_t end;
  // Each once, 64 bytes: to be waited for before the first read.
  std::vector<std::string> events;
};

struct HandleCounter {
  std::string file;
  // Each share's once.
  std::vector<int32_t> slots;
};

struct HandleList {
  // Of every tensor, in order. Names one after another, and where each ends.
  std::string names;
  std::vector<int32_t> name_ends;
  std::vector<uint8_t> dtypes;  // as DType has them
  std::vector<uint8_t> dims;
  std::vector<double> sizes;  // all shapes, one after another
  std::vector<int32_t> segments;
  std::vector<double> offsets;  // bytes into the segment

  // How many tensors there are up to the end of each pickle.
  std::vector<int32_t> ends;
  std::vector<SenderDevice> devices;
  std::vector<HandleSegment> segment_list;
  std::vector<HandleCounter> counters;
};

// Reads pickles that share nothing with each other. Nothing where anything in them is of another kind (views, empty
// tensors, other dtypes, other memory, names that are not ASCII) or wrong: src/wire/torch/body.ts reads all there is,
// and says what is wrong. What is checked here is what that checks; of handles, cards and counter files' names the
// caller sees to what they say.
std::optional<HandleList> read_handle_list(std::span<const std::span<const uint8_t>> pickles, const RoleOf& role_of);

}  // namespace refit
