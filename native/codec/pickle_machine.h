// The opcodes of Python's pickle (protocols 2 to 5; Lib/pickletools.py describes each) in which lists of tensors'
// handles are written, as a machine of small values. It reads what it knows and gives up on everything else, of which
// src/wire/pickle/reader.ts knows more and says what is wrong: the two agree on all that this one takes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace refit {

// What a global name is to handles. The closed set of names is src/wire/torch/names.ts; the numbers are those of
// src/native/handles.ts.
enum class PickleRole : uint8_t {
  kUnknown,
  kRebuild,      // a function that rebuilds a tensor of a card
  kTuple,        // a subclass of tuple
  kTensorClass,  // and what follows stands for itself
  kStorageClass,
  kBfloat16,
  kFloat16,
  kFloat32
};
constexpr int kPickleRoles = 8;

using RoleOf = std::function<PickleRole(std::string_view module, std::string_view name)>;

// The limits of src/wire/pickle/limits.ts.
struct PickleLimits {
  size_t bytes = size_t{256} << 20;
  size_t memo = size_t{1} << 21;
  size_t objects = size_t{1} << 21;
  size_t items = size_t{1} << 23;
  size_t stack = size_t{1} << 20;
  size_t depth = 64;
  size_t text = size_t{1} << 20;
  size_t name = 256;
};

struct PickleValue {
  enum class Type : uint8_t { kNone, kBool, kInt, kText, kBytes, kTuple, kList, kRole, kRebuilt };

  Type type;
  PickleRole role = PickleRole::kUnknown;
  // Bytes of text (ASCII alone) and bytes; items of tuples and of the arguments that a rebuilt tensor has.
  uint32_t size = 0;
  // The int, or 0 and 1 for a bool; where text and bytes begin in the pickle; the first item; which list.
  int64_t at = 0;
};

class PickleMachine {
 public:
  PickleMachine(std::span<const uint8_t> pickle, const RoleOf& role_of, const PickleLimits& limits = {});

  // The whole pickle. False: there is something that it does not know, or that is wrong.
  bool run();

  // The value that is left. The others are what it is made of.
  const PickleValue& root() const { return stack_[0]; }
  std::span<const PickleValue> items(const PickleValue& value) const;
  std::span<const uint8_t> bytes(const PickleValue& value) const { return pickle_.subspan(value.at, value.size); }
  std::string_view text(const PickleValue& value) const;

 private:
  // They lie in the pickle.
  struct KnownName {
    std::string_view module, name;
    PickleRole role;
  };

  bool step(uint8_t opcode);
  bool take(size_t count);
  bool take_ascii(size_t count);
  bool push(const PickleValue& value);
  bool make(const PickleValue& value);
  bool pop(PickleValue& value);
  bool unmark(size_t& from);
  bool count_items(size_t from);
  bool tuple(size_t from);
  bool append(size_t from);
  bool memoize(size_t index);
  bool get(size_t index);
  bool small_integer(size_t bytes);
  bool long_integer(size_t bytes);
  bool text_or_bytes(PickleValue::Type type, size_t size);
  bool line(std::string_view& line);
  bool name(std::string_view module, std::string_view name);
  bool stack_name();
  bool reduce();
  bool frame();
  uint64_t number(size_t bytes) const;

  const std::span<const uint8_t> pickle_;
  const RoleOf& role_of_;
  const PickleLimits limits_;
  size_t at_ = 0;
  // Where the operand that was taken last begins.
  size_t operand_ = 0;
  size_t frame_end_ = 0;
  size_t objects_ = 0;
  size_t item_count_ = 0;
  std::vector<PickleValue> stack_;
  // Stack heights at the open MARKs. Values below the innermost cannot be reached.
  std::vector<size_t> marks_;
  std::vector<PickleValue> memo_;
  std::vector<PickleValue> items_;
  std::vector<std::vector<PickleValue>> lists_;
  std::vector<KnownName> known_names_;
};

}  // namespace refit
