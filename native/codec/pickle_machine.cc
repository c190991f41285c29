#include "codec/pickle_machine.h"

#include <algorithm>
#include <cstring>

namespace refit {
namespace {

constexpr uint8_t kProto = 0x80;
constexpr size_t kKnownNames = 16;
constexpr uint8_t kStop = '.';
constexpr int64_t kMaxSafe = (int64_t{1} << 53) - 1;

}  // namespace

using Type = PickleValue::Type;

PickleMachine::PickleMachine(std::span<const uint8_t> pickle, const RoleOf& role_of, const PickleLimits& limits)
    : pickle_(pickle), role_of_(role_of), limits_(limits) {}

bool PickleMachine::run() {
  if (pickle_.size() < 2 || pickle_.size() > limits_.bytes || pickle_[0] != kProto) return false;
  if (pickle_[1] < 2 || pickle_[1] > 5) return false;
  at_ = 2;
  // What handles take, so that little is copied as they grow.
  const size_t expected = std::min(pickle_.size() / 16, limits_.memo);
  memo_.reserve(expected);
  items_.reserve(expected);
  for (;;) {
    if (at_ >= pickle_.size()) return false;
    const uint8_t opcode = pickle_[at_++];
    if (opcode == kStop) return stack_.size() == 1 && marks_.empty() && at_ == pickle_.size();
    if (!step(opcode)) return false;
  }
}

std::span<const PickleValue> PickleMachine::items(const PickleValue& value) const {
  if (value.type == Type::kList) return lists_[value.at];
  return {items_.data() + value.at, value.size};
}

std::string_view PickleMachine::text(const PickleValue& value) const {
  return {reinterpret_cast<const char*>(pickle_.data()) + value.at, value.size};
}

bool PickleMachine::step(uint8_t opcode) {
  size_t from = 0;
  switch (opcode) {
    case 0x94:
      return memoize(memo_.size());  // MEMOIZE
    case 'K':
      return small_integer(1);  // BININT1
    case 'M':
      return small_integer(2);  // BININT2
    case 'J':
      return take(4) && push({Type::kInt, {}, 0, static_cast<int32_t>(number(4))});  // BININT
    case 0x8a:
      return take(1) && long_integer(number(1));  // LONG1
    case 'h':
      return take(1) && get(number(1));  // BINGET
    case 'j':
      return take(4) && get(number(4));  // LONG_BINGET
    case 'q':
      return take(1) && memoize(number(1));  // BINPUT
    case 'r':
      return take(4) && memoize(number(4));  // LONG_BINPUT
    case ')':
      return push({Type::kTuple, {}, 0, 0});  // EMPTY_TUPLE
    case 0x85:
      return stack_.size() >= 1 && tuple(stack_.size() - 1);  // TUPLE1
    case 0x86:
      return stack_.size() >= 2 && tuple(stack_.size() - 2);  // TUPLE2
    case 0x87:
      return stack_.size() >= 3 && tuple(stack_.size() - 3);  // TUPLE3
    case 't':
      return unmark(from) && tuple(from);  // TUPLE
    case 'R':
      return reduce();  // REDUCE
    case 'N':
      return push({Type::kNone});  // NONE
    case 0x88:
      return push({Type::kBool, {}, 0, 1});  // NEWTRUE
    case 0x89:
      return push({Type::kBool, {}, 0, 0});  // NEWFALSE
    case 'C':
      return take(1) && text_or_bytes(Type::kBytes, number(1));  // SHORT_BINBYTES
    case 'B':
      return take(4) && text_or_bytes(Type::kBytes, number(4));  // BINBYTES
    case 0x8c:
      return take(1) && text_or_bytes(Type::kText, number(1));  // SHORT_BINUNICODE
    case 'X':
      return take(4) && text_or_bytes(Type::kText, number(4));  // BINUNICODE
    case 'a':
      return stack_.size() >= 1 && append(stack_.size() - 1);  // APPEND
    case 'e':
      return unmark(from) && append(from);  // APPENDS
    case 0x93:
      return stack_name();  // STACK_GLOBAL
    case 0x95:
      return frame();  // FRAME
    case ']':          // EMPTY_LIST
      lists_.emplace_back();
      return make({Type::kList, {}, 0, static_cast<int64_t>(lists_.size() - 1)});
    case '(':  // MARK
      if (marks_.size() >= limits_.depth) return false;
      marks_.push_back(stack_.size());
      return true;
    case 'c': {  // GLOBAL
      std::string_view module, found;
      return line(module) && line(found) && name(module, found);
    }
    default:
      return false;
  }
}

// Moves past `count` bytes, which begin at `operand_` then.
bool PickleMachine::take(size_t count) {
  if (count > pickle_.size() - at_) return false;
  operand_ = at_;
  at_ += count;
  return true;
}

bool PickleMachine::take_ascii(size_t count) {
  if (count > limits_.text || !take(count)) return false;
  uint8_t all = 0;
  for (const uint8_t byte : pickle_.subspan(operand_, count)) all |= byte;
  return all < 0x80;
}

// The operand as an unsigned little-endian number of at most 8 bytes.
uint64_t PickleMachine::number(size_t bytes) const {
  uint64_t value = 0;
  std::memcpy(&value, pickle_.data() + operand_, bytes);
  return value;
}

bool PickleMachine::push(const PickleValue& value) {
  if (stack_.size() >= limits_.stack) return false;
  stack_.push_back(value);
  return true;
}

// Pushes what takes memory.
bool PickleMachine::make(const PickleValue& value) { return ++objects_ <= limits_.objects && push(value); }

bool PickleMachine::pop(PickleValue& value) {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return false;
  value = stack_.back();
  stack_.pop_back();
  return true;
}

// Closes the innermost MARK and says where its values begin.
bool PickleMachine::unmark(size_t& from) {
  if (marks_.empty()) return false;
  from = marks_.back();
  marks_.pop_back();
  return true;
}

// Whether the values from `from` on can be reached, and may become items.
bool PickleMachine::count_items(size_t from) {
  if (from < (marks_.empty() ? 0 : marks_.back())) return false;
  item_count_ += stack_.size() - from;
  return item_count_ <= limits_.items;
}

bool PickleMachine::tuple(size_t from) {
  if (!count_items(from)) return false;
  const auto first = static_cast<int64_t>(items_.size());
  const auto size = static_cast<uint32_t>(stack_.size() - from);
  items_.insert(items_.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
  stack_.resize(from, {Type::kNone});
  return make({Type::kTuple, {}, size, first});
}

bool PickleMachine::append(size_t from) {
  if (!count_items(from) || from == 0 || from == (marks_.empty() ? 0 : marks_.back())) return false;
  if (stack_[from - 1].type != Type::kList) return false;
  std::vector<PickleValue>& list = lists_[stack_[from - 1].at];
  list.insert(list.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
  stack_.resize(from, {Type::kNone});
  return true;
}

// Picklers number their memo from 0 on without holes.
bool PickleMachine::memoize(size_t index) {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return false;
  if (index > memo_.size() || index >= limits_.memo) return false;
  if (index == memo_.size()) {
    memo_.push_back(stack_.back());
  } else {
    memo_[index] = stack_.back();
  }
  return true;
}

bool PickleMachine::get(size_t index) { return index < memo_.size() && push(memo_[index]); }

bool PickleMachine::small_integer(size_t bytes) {
  return take(bytes) && push({Type::kInt, {}, 0, static_cast<int64_t>(number(bytes))});
}

// Two's complement. What no JavaScript number holds is left to who knows big ones.
bool PickleMachine::long_integer(size_t bytes) {
  if (bytes > 8 || !take(bytes)) return false;
  const int unused = static_cast<int>(64 - 8 * bytes);
  const int64_t value = bytes == 0 ? 0 : static_cast<int64_t>(number(bytes) << unused) >> unused;
  return value <= kMaxSafe && value >= -kMaxSafe && push({Type::kInt, {}, 0, value});
}

bool PickleMachine::text_or_bytes(Type type, size_t size) {
  if (!(type == Type::kText ? take_ascii(size) : take(size))) return false;
  return make({type, {}, static_cast<uint32_t>(size), static_cast<int64_t>(operand_)});
}

bool PickleMachine::line(std::string_view& line) {
  const auto rest = pickle_.subspan(at_);
  const auto end =
      std::find(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(std::min(rest.size(), limits_.name + 1)), '\n');
  const auto size = static_cast<size_t>(end - rest.begin());
  if (size >= rest.size() || size > limits_.name || !take_ascii(size)) return false;
  line = {reinterpret_cast<const char*>(rest.data()), size};
  at_++;
  return true;
}

// Most picklers write a name once and memoize it; for those that don't, the first ones are remembered.
bool PickleMachine::name(std::string_view module, std::string_view name) {
  for (const KnownName& known : known_names_) {
    if (known.module == module && known.name == name) return push({Type::kRole, known.role});
  }
  const PickleRole role = role_of_(module, name);
  if (role == PickleRole::kUnknown) return false;
  if (known_names_.size() < kKnownNames) known_names_.push_back({module, name, role});
  return push({Type::kRole, role});
}

bool PickleMachine::stack_name() {
  PickleValue found, module;
  if (!pop(found) || !pop(module) || found.type != Type::kText || module.type != Type::kText) return false;
  // Of a text that stands there once, thousands of names may be made.
  return module.size <= limits_.name && found.size <= limits_.name && name(text(module), text(found));
}

bool PickleMachine::reduce() {
  PickleValue args, callee;
  if (!pop(args) || !pop(callee) || args.type != Type::kTuple || callee.type != Type::kRole) return false;
  if (callee.role == PickleRole::kRebuild) return make({Type::kRebuilt, {}, args.size, args.at});
  if (callee.role != PickleRole::kTuple || args.size != 1 || items(args)[0].type != Type::kTuple) return false;
  const PickleValue tuple = items(args)[0];
  return make(tuple);
}

bool PickleMachine::frame() {
  const size_t opcode = at_ - 1;
  if (!take(8) || opcode < frame_end_ || number(8) > pickle_.size() - at_) return false;
  frame_end_ = at_ + number(8);
  return true;
}

}  // namespace refit
