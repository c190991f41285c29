#include "codec/handle_list.h"

#include <map>
#include <set>
#include <string_view>

namespace refit {
namespace {

using Type = PickleType;

constexpr size_t kArguments = 15;
constexpr size_t kSlots = 10'000;
// A sender starts another counter file after 10,000 handles.
constexpr size_t kMaxCounters = 1024;
constexpr size_t kEventBytes = 64;
constexpr size_t kMaxName = 2048;
constexpr size_t kMaxDims = 64;
// Limits on tensors (as in src/wire/safetensors/header.ts), on stored bytes of names and segments, and on compared
// bytes. The size of a pickle does not bound them, because thousands of tensors may use one value of it.
constexpr size_t kMaxTensors = 500'000;
constexpr uint64_t kMaxStored = uint64_t{256} << 20, kMaxCompared = uint64_t{4} << 30;
constexpr uint64_t kMaxSafe = (uint64_t{1} << 53) - 1;

std::string_view as_view(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_size(PickleValue value) { return value.type() == Type::kInt && value.integer() >= 0; }

HandleRole role_of(const PickleMachine& machine, PickleValue value) {
  if (value.type() != Type::kName) return HandleRole::kUnknown;
  return static_cast<HandleRole>(machine.name(value).role);
}

std::optional<DType> dtype_of(HandleRole role) {
  if (role < HandleRole::kDType) return std::nullopt;
  return static_cast<DType>(static_cast<uint8_t>(role) - static_cast<uint8_t>(HandleRole::kDType));
}

// Indices of texts in the order of their first use. Consecutive tensors mostly have the same text. This is a tree and
// not a hash table because the sender chooses the keys and could choose them to collide.
class Index {
 public:
  // Calls `fresh` for a text that is new.
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

// The storage that a slot of a counter file counts references of.
struct Storage {
  size_t segment;
  uint64_t offset;
  uint64_t bytes;
  // The index of its pickle.
  size_t pickle;
};

class Reader {
 public:
  explicit Reader(const FindName& find_name) : find_name_(find_name) {}

  bool read(std::span<const uint8_t> pickle) {
    PickleMachine machine(pickle, find_name_);
    try {
      machine.run();
    } catch (const PickleError&) {
      return false;
    }
    if (machine.root().type() != Type::kList) return false;
    const auto pairs = machine.items(machine.root());
    for (const PickleValue pair : pairs) {
      if (pair.type() != Type::kTuple) return false;
      const auto items = machine.items(pair);
      if (items.size() != 2 || items[1].type() != Type::kCall || !name(machine, items[0])) return false;
      if (static_cast<HandleRole>(machine.callee(items[1]).role) != HandleRole::kRebuild) return false;
      if (!tensor(machine, machine.arguments(items[1]))) return false;
    }
    out_.ends.push_back(static_cast<int32_t>(out_.name_ends.size()));
    return !pairs.empty();
  }

  HandleList take() { return std::move(out_); }

 private:
  bool name(const PickleMachine& machine, PickleValue value) {
    // src/wire/torch/body.ts reads names that are not ASCII and parts of adapters.
    if (value.type() != Type::kText || machine.object(value).more != 1) return false;
    const std::string_view text = machine.text(value);
    if (text.empty() || text.size() > kMaxName) return false;
    if (text.find('\0') != text.npos || text.find("lora_") != text.npos) return false;
    out_.names += text;
    if (out_.names.size() > kMaxStored || out_.name_ends.size() >= kMaxTensors) return false;
    out_.name_ends.push_back(static_cast<int32_t>(out_.names.size()));
    return true;
  }

  // The arguments of rebuild_cuda_tensor.
  bool tensor(const PickleMachine& machine, std::span<const PickleValue> args) {
    if (args.size() != kArguments) return false;
    const std::optional<DType> dtype = dtype_of(role_of(machine, args[5]));
    if (role_of(machine, args[0]) != HandleRole::kTensorClass ||
        role_of(machine, args[4]) != HandleRole::kStorageClass || !dtype || args[10].type() != Type::kBool) {
      return false;
    }
    uint64_t elements = 1;
    if (!row_major(machine, args[1], args[2], elements) || !is_size(args[3]) || !is_size(args[8]) ||
        !is_size(args[9])) {
      return false;
    }
    const uint64_t item_bytes = size_of(*dtype);
    const auto start = static_cast<uint64_t>(args[3].integer()), bytes = static_cast<uint64_t>(args[8].integer()),
               offset = static_cast<uint64_t>(args[9].integer());
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

  // Stores the shape. Returns false for strides that leave gaps and for a tensor without elements.
  bool row_major(const PickleMachine& machine, PickleValue shape, PickleValue stride, uint64_t& elements) {
    if (shape.type() != Type::kTuple || stride.type() != Type::kTuple) return false;
    const auto sizes = machine.items(shape), steps = machine.items(stride);
    if (sizes.size() != steps.size() || sizes.size() > kMaxDims) return false;
    for (size_t axis = sizes.size(); axis-- > 0;) {
      if (!is_size(sizes[axis]) || !is_size(steps[axis]) || sizes[axis].integer() == 0) return false;
      const auto size = static_cast<uint64_t>(sizes[axis].integer());
      if (size > 1 && static_cast<uint64_t>(steps[axis].integer()) != elements) return false;
      if (elements > kMaxSafe / size) return false;
      elements *= size;
    }
    for (const PickleValue size : sizes) out_.sizes.push_back(static_cast<double>(size.integer()));
    out_.dims.push_back(static_cast<uint8_t>(sizes.size()));
    return true;
  }

  bool find_segment(const PickleMachine& machine, std::span<const PickleValue> args, uint64_t end, size_t& segment) {
    const PickleValue device = args[6];
    const bool numbered = is_size(device);
    if (args[7].type() != Type::kBytes || !(numbered || device.type() == Type::kText)) return false;
    if (args[11].type() != Type::kBytes) return false;
    const std::string number = numbered ? std::to_string(device.integer()) : std::string();
    const std::string_view called = numbered ? std::string_view(number) : machine.text(device);
    const std::string_view handle = as_view(machine.bytes(args[7]));
    compared_ += handle.size() + machine.bytes(args[11]).size() + (numbered ? 0 : called.size());
    if (compared_ > kMaxCompared) return false;
    key_.assign(1, numbered ? '#' : '\'');
    key_ += called;
    const size_t device_index = device_index_.find(key_, [&] {
      if (numbered) {
        out_.devices.emplace_back(device.integer());
      } else {
        out_.devices.emplace_back(std::string(called));
      }
    });
    key_ += '\0';
    key_ += handle;
    segment = segment_index_.find(key_, [&] {
      stored_ += key_.size();
      if (stored_ > kMaxStored) return;
      out_.segment_list.push_back({device_index, std::string(handle), 0, {}});
      events_.emplace_back();
    });
    if (stored_ > kMaxStored) return false;
    HandleSegment& found = out_.segment_list[segment];
    if (end > found.end) found.end = end;
    return add_event(machine, args, segment);
  }

  bool add_event(const PickleMachine& machine, std::span<const PickleValue> args, size_t segment) {
    if (args[13].type() != Type::kBytes || args[14].type() != Type::kBool) return false;
    const std::string_view event = as_view(machine.bytes(args[13]));
    if (event.size() != kEventBytes) return false;
    if (args[14].integer() == 0) return true;
    HandleSegment& found = out_.segment_list[segment];
    if (!found.events.empty() && found.events.back() == event) return true;
    if (events_[segment].emplace(event).second) found.events.emplace_back(event);
    return true;
  }

  // Counts one reference of the storage's slot, once. Returns false for a slot of two storages, and for a slot that two
  // pickles name.
  bool count(const PickleMachine& machine, std::span<const PickleValue> args, const Storage& storage) {
    if (!is_size(args[12]) || args[12].integer() >= static_cast<int64_t>(kSlots)) return false;
    const std::string_view file = as_view(machine.bytes(args[11]));
    const size_t counter = counter_index_.find(file, [&] {
      out_.counters.push_back({std::string(file), {}});
      slots_.emplace_back(kSlots, -1);
    });
    if (out_.counters.size() > kMaxCounters) return false;
    int32_t& known = slots_[counter][static_cast<size_t>(args[12].integer())];
    if (known < 0) {
      known = static_cast<int32_t>(storages_.size());
      storages_.push_back(storage);
      out_.counters[counter].slots.push_back(static_cast<int32_t>(args[12].integer()));
      return true;
    }
    const Storage& other = storages_[static_cast<size_t>(known)];
    return other.segment == storage.segment && other.offset == storage.offset && other.bytes == storage.bytes &&
           other.pickle == storage.pickle;
  }

  const FindName& find_name_;
  HandleList out_;
  Index device_index_, segment_index_, counter_index_;
  std::vector<std::set<std::string, std::less<>>> events_;  // by segment
  std::vector<std::vector<int32_t>> slots_;                 // by counter and slot: index of a storage, or -1
  std::vector<Storage> storages_;
  std::string key_;
  uint64_t stored_ = 0, compared_ = 0;
};

}  // namespace

std::optional<HandleList> read_handle_list(std::span<const std::span<const uint8_t>> pickles,
                                           const FindRole& find_role) {
  if (pickles.empty()) return std::nullopt;
  const FindName find_name = [&](std::string_view module, std::string_view name) -> PickleMeaning {
    const HandleRole role = find_role(module, name);
    const PickleUse use = role == HandleRole::kRebuild ? PickleUse::kCall
                          : role == HandleRole::kTuple ? PickleUse::kTuple
                                                       : PickleUse::kValue;
    return {role != HandleRole::kUnknown, use, static_cast<int>(role)};
  };
  Reader reader(find_name);
  for (const auto pickle : pickles) {
    if (!reader.read(pickle)) return std::nullopt;
  }
  return reader.take();
}

}  // namespace refit
