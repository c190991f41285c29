#include "codec/handle_list.h"

#include <map>
#include <set>
#include <string_view>

namespace refit {
namespace {

using Type = PickleValue::Type;

constexpr size_t kArguments = 15;
constexpr size_t kSlots = 10'000;
// A sender starts another file for every 10,000 shares.
constexpr size_t kMaxCounters = 1024;
constexpr size_t kEventBytes = 64;
constexpr size_t kMaxName = 2048;
constexpr size_t kMaxDims = 64;
// A pickle says once what thousands of tensors name, and its size bounds none of these: tensors (as in
// src/wire/safetensors/header.ts), bytes that are put down, of names and of segments, and bytes that are looked at.
constexpr size_t kMaxTensors = 500'000;
constexpr uint64_t kMaxPut = uint64_t{256} << 20, kMaxLooked = uint64_t{4} << 30;
constexpr uint64_t kMaxSafe = (uint64_t{1} << 53) - 1;

std::string_view as_view(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_size(const PickleValue& value) { return value.type == Type::kInt && value.at >= 0; }
bool is_role(const PickleValue& value, PickleRole role) { return value.type == Type::kRole && value.role == role; }

std::optional<DType> dtype_of(const PickleValue& value) {
  if (is_role(value, PickleRole::kBfloat16)) return DType::kBFloat16;
  if (is_role(value, PickleRole::kFloat16)) return DType::kFloat16;
  if (is_role(value, PickleRole::kFloat32)) return DType::kFloat32;
  return std::nullopt;
}

// Trees, not hash tables: the keys are the sender's. Indices of texts in the order in which they were met; tensors that
// come one after another mostly have the same.
class Index {
 public:
  // `fresh` is called for a text that is not there yet.
  template <typename Fresh>
  size_t find(std::string_view text, Fresh fresh) {
    if (!known_.empty() && text == last_text_) return last_;
    auto at = known_.find(text);
    if (at == known_.end()) {
      at = known_.emplace(text, known_.size()).first;
      fresh();
    }
    last_text_ = at->first;
    last_ = at->second;
    return last_;
  }

 private:
  std::map<std::string, size_t, std::less<>> known_;
  std::string_view last_text_;
  size_t last_ = 0;
};

struct Share {
  size_t segment;
  uint64_t offset;
  uint64_t bytes;
  // The pickle that brought it.
  size_t pickle;
};

class Reader {
 public:
  explicit Reader(const RoleOf& role_of) : role_of_(role_of) {}

  bool read(std::span<const uint8_t> pickle) {
    PickleMachine machine(pickle, role_of_);
    if (!machine.run() || machine.root().type != Type::kList) return false;
    const auto pairs = machine.items(machine.root());
    for (const PickleValue& pair : pairs) {
      if (pair.type != Type::kTuple || pair.size != 2) return false;
      const auto items = machine.items(pair);
      if (items[1].type != Type::kRebuilt || !name(machine, items[0]) || !tensor(machine, machine.items(items[1]))) {
        return false;
      }
    }
    out_.ends.push_back(static_cast<int32_t>(out_.name_ends.size()));
    return !pairs.empty();
  }

  HandleList take() { return std::move(out_); }

 private:
  bool name(const PickleMachine& machine, const PickleValue& value) {
    if (value.type != Type::kText || value.size == 0 || value.size > kMaxName) return false;
    const std::string_view text = machine.text(value);
    // Parts of adapters have names that are looked at more closely.
    if (text.find('\0') != text.npos || text.find("lora_") != text.npos) return false;
    out_.names += text;
    if (out_.names.size() > kMaxPut || out_.name_ends.size() >= kMaxTensors) return false;
    out_.name_ends.push_back(static_cast<int32_t>(out_.names.size()));
    return true;
  }

  // The arguments of rebuild_cuda_tensor.
  bool tensor(const PickleMachine& machine, std::span<const PickleValue> args) {
    if (args.size() != kArguments) return false;
    const std::optional<DType> dtype = dtype_of(args[5]);
    if (!is_role(args[0], PickleRole::kTensorClass) || !is_role(args[4], PickleRole::kStorageClass) || !dtype ||
        args[10].type != Type::kBool) {
      return false;
    }
    uint64_t elements = 1;
    if (!row_major(machine, args[1], args[2], elements) || !is_size(args[3]) || !is_size(args[8]) ||
        !is_size(args[9])) {
      return false;
    }
    const uint64_t item_bytes = size_of(*dtype);
    const auto start = static_cast<uint64_t>(args[3].at), bytes = static_cast<uint64_t>(args[8].at),
               offset = static_cast<uint64_t>(args[9].at);
    // None of these overflows: elements, start and bytes are below 2^53.
    if ((start + elements) * item_bytes > bytes || offset + bytes > kMaxSafe) return false;
    size_t segment = 0;
    if (!find_segment(machine, args, offset + bytes, segment) ||
        !count(machine, args, {segment, offset, bytes, out_.ends.size()})) {
      return false;
    }
    out_.dtypes.push_back(static_cast<uint8_t>(*dtype));
    out_.segments.push_back(static_cast<int32_t>(segment));
    out_.offsets.push_back(static_cast<double>(offset + start * item_bytes));
    return true;
  }

  // Puts the shape down. False for strides that leave gaps, and for a tensor without elements.
  bool row_major(const PickleMachine& machine, const PickleValue& shape, const PickleValue& stride,
                 uint64_t& elements) {
    if (shape.type != Type::kTuple || stride.type != Type::kTuple || shape.size != stride.size ||
        shape.size > kMaxDims) {
      return false;
    }
    const auto sizes = machine.items(shape), steps = machine.items(stride);
    for (size_t axis = sizes.size(); axis-- > 0;) {
      if (!is_size(sizes[axis]) || !is_size(steps[axis]) || sizes[axis].at == 0) return false;
      const auto size = static_cast<uint64_t>(sizes[axis].at);
      if (size > 1 && static_cast<uint64_t>(steps[axis].at) != elements) return false;
      if (elements > kMaxSafe / size) return false;
      elements *= size;
    }
    for (const PickleValue& size : sizes) out_.sizes.push_back(static_cast<double>(size.at));
    out_.dims.push_back(static_cast<uint8_t>(sizes.size()));
    return true;
  }

  bool find_segment(const PickleMachine& machine, std::span<const PickleValue> args, uint64_t end, size_t& segment) {
    const PickleValue& device = args[6];
    if (args[7].type != Type::kBytes || !(is_size(device) || device.type == Type::kText)) return false;
    looked_ += args[7].size + args[11].size + (device.type == Type::kText ? device.size : 0);
    if (looked_ > kMaxLooked) return false;
    key_.clear();
    const std::string number = device.type == Type::kInt ? std::to_string(device.at) : std::string();
    key_ += device.type == Type::kInt ? '#' : '\'';
    key_ += device.type == Type::kInt ? std::string_view(number) : machine.text(device);
    const size_t gpu = device_index_.find(key_, [&] {
      if (device.type == Type::kInt) {
        out_.devices.emplace_back(device.at);
      } else {
        out_.devices.emplace_back(std::string(machine.text(device)));
      }
    });
    const std::string_view handle = as_view(machine.bytes(args[7]));
    key_ += '\0';
    key_ += handle;
    segment = segment_index_.find(key_, [&] {
      put_ += key_.size();
      if (put_ > kMaxPut) return;
      out_.segment_list.push_back({gpu, std::string(handle), 0, {}});
      events_.emplace_back();
    });
    if (put_ > kMaxPut) return false;
    HandleSegment& found = out_.segment_list[segment];
    if (end > found.end) found.end = end;
    if (args[13].type != Type::kBytes || args[13].size != kEventBytes || args[14].type != Type::kBool) return false;
    if (args[14].at == 0) return true;
    const std::string_view event = as_view(machine.bytes(args[13]));
    if (!found.events.empty() && found.events.back() == event) return true;
    if (events_[segment].emplace(event).second) found.events.emplace_back(event);
    return true;
  }

  // One reference of the share's slot, once. False for a slot that stands for two shares, or for one of two pickles.
  bool count(const PickleMachine& machine, std::span<const PickleValue> args, const Share& share) {
    if (args[11].type != Type::kBytes || !is_size(args[12]) || args[12].at >= static_cast<int64_t>(kSlots))
      return false;
    const std::string_view file = as_view(machine.bytes(args[11]));
    const size_t counter = counter_index_.find(file, [&] {
      out_.counters.push_back({std::string(file), {}});
      shares_.emplace_back(kSlots, -1);
    });
    if (out_.counters.size() > kMaxCounters) return false;
    int32_t& known = shares_[counter][static_cast<size_t>(args[12].at)];
    if (known < 0) {
      known = static_cast<int32_t>(share_list_.size());
      share_list_.push_back(share);
      out_.counters[counter].slots.push_back(static_cast<int32_t>(args[12].at));
      return true;
    }
    const Share& other = share_list_[static_cast<size_t>(known)];
    return other.segment == share.segment && other.offset == share.offset && other.bytes == share.bytes &&
           other.pickle == share.pickle;
  }

  const RoleOf& role_of_;
  HandleList out_;
  Index device_index_, segment_index_, counter_index_;
  std::vector<std::set<std::string, std::less<>>> events_;  // by segment
  std::vector<std::vector<int32_t>> shares_;                // by counter and slot; -1 for none
  std::vector<Share> share_list_;
  std::string key_;
  uint64_t put_ = 0, looked_ = 0;
};

}  // namespace

std::optional<HandleList> read_handle_list(std::span<const std::span<const uint8_t>> pickles, const RoleOf& role_of) {
  if (pickles.empty()) return std::nullopt;
  Reader reader(role_of);
  for (const auto pickle : pickles) {
    if (!reader.read(pickle)) return std::nullopt;
  }
  return reader.take();
}

}  // namespace refit
