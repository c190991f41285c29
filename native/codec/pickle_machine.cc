#include "codec/pickle_machine.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "codec/pickle_opcodes.h"
#include "codec/utf8.h"

namespace refit {
namespace {

constexpr uint8_t kProto = 0x80, kStop = '.';
constexpr int kLowestProtocol = 2, kHighestProtocol = 5;
constexpr size_t kMaxLongBytes = 32;
// The largest integer that a JavaScript number holds exactly.
constexpr int64_t kMaxInteger = (int64_t{1} << 53) - 1;
// Object 0 is the empty tuple.
constexpr int64_t kEmptyTuple = 0;

using Type = PickleType;
using Kind = PickleError::Kind;

std::string to_text(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return {text, end};
}

}  // namespace

PickleMachine::PickleMachine(std::span<const uint8_t> pickle, const FindName& find_name, const PickleLimits& limits)
    : pickle_(pickle), find_name_(find_name), limits_(limits), encode_budget_(pickle.size()) {}

void PickleMachine::run() {
  start();
  for (;;) {
    op_ = at_;
    if (at_ >= pickle_.size()) cut_off();
    const uint8_t opcode = pickle_[at_++];
    if (opcode == kStop) return stop();
    if (!scalar(opcode)) compound(opcode);
  }
}

void PickleMachine::start() {
  if (pickle_.size() > limits_.bytes) {
    limited(std::to_string(pickle_.size()) + " bytes, at most " + std::to_string(limits_.bytes) + " are read");
  }
  if (pickle_.empty()) malformed("it is empty");
  if (pickle_[0] != kProto) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", pickle_[0]);
    malformed(std::string("it does not begin with PROTO (80) but with ") + hex);
  }
  if (pickle_.size() < 2) cut_off();
  if (pickle_[1] < kLowestProtocol || pickle_[1] > kHighestProtocol) {
    malformed("protocol " + std::to_string(pickle_[1]) + "; " + std::to_string(kLowestProtocol) + " to " +
              std::to_string(kHighestProtocol) + " are read");
  }
  at_ = 2;
  objects_.push_back({Type::kTuple});
  // The size that lists of handles need. With it little is copied as the tables grow.
  const size_t expected = std::min(pickle_.size() / 16, limits_.memo);
  memo_.reserve(expected);
  items_.reserve(expected);
  objects_.reserve(expected);
}

void PickleMachine::stop() {
  if (stack_.size() != 1 || !marks_.empty()) {
    malformed("it stops with " + std::to_string(stack_.size()) + " values on its stack");
  }
  if (at_ == pickle_.size()) return;
  op_ = at_;
  malformed(std::to_string(pickle_.size() - at_) + " bytes follow its end");
}

std::span<const PickleValue> PickleMachine::items(const PickleObject& object) const {
  if (object.type != Type::kTuple) return lists_[object.at];
  return {items_.data() + object.at, object.size};
}

std::string_view PickleMachine::text(PickleValue value) const {
  const PickleObject& found = object(value);
  return {reinterpret_cast<const char*>(pickle_.data()) + found.at, found.size};
}

std::span<const uint8_t> PickleMachine::bytes(PickleValue value) const {
  const PickleObject& found = object(value);
  const std::span<const uint8_t> from = found.type == Type::kEncoded ? std::span<const uint8_t>(encoded_) : pickle_;
  return from.subspan(found.at, found.size);
}

void PickleMachine::malformed(std::string message) const { throw PickleError{Kind::kMalformed, op_, message}; }
void PickleMachine::refused(std::string message) const { throw PickleError{Kind::kRefused, op_, message}; }
void PickleMachine::limited(std::string message) const { throw PickleError{Kind::kLimit, op_, message}; }
void PickleMachine::cut_off() const { malformed("it is cut off after " + std::to_string(pickle_.size()) + " bytes"); }
void PickleMachine::underflow() const { malformed("an opcode takes more values than there are"); }

// A short description of a value for a message, without the contents of strings.
std::string PickleMachine::describe(PickleValue value) const {
  const auto items_of = [&] { return std::to_string(items(value).size()); };
  switch (value.type()) {
    case Type::kNone:
      return "None";
    case Type::kBool:
      return value.integer() == 0 ? "False" : "True";
    case Type::kInt:
      return "the int " + std::to_string(value.integer());
    case Type::kLong:
      return "an int of " + std::to_string(value.index() % 256) + " bytes";
    case Type::kName:
      return std::string(name(value).name);
    case Type::kText:
      return "a str";
    case Type::kBytes:
    case Type::kEncoded:
      return std::to_string(object(value).size) + " bytes";
    case Type::kFloat: {
      uint64_t bits = 0;
      for (const uint8_t byte : bytes(value)) bits = bits << 8 | byte;
      double number = 0;
      std::memcpy(&number, &bits, sizeof number);
      return "the float " + to_text(number);
    }
    case Type::kTuple:
      return "a tuple of " + items_of();
    case Type::kList:
      return "a list of " + items_of();
    case Type::kDict:
      return "a dict of " + std::to_string(items(value).size() / 2);
    case Type::kSet:
      return "a set of " + items_of();
    case Type::kCall:
      return "a " + std::string(callee(value).name);
  }
  return "a value";
}

bool PickleMachine::scalar(uint8_t opcode) {
  switch (opcode) {
    case 0x94:
      memoize(memo_.size());
      break;  // MEMOIZE
    case 'K':
      push({Type::kInt, static_cast<int64_t>(number(1))});
      break;  // BININT1
    case 'M':
      push({Type::kInt, static_cast<int64_t>(number(2))});
      break;  // BININT2
    case 'J':
      push({Type::kInt, static_cast<int32_t>(number(4))});
      break;  // BININT
    case 'h':
      get(number(1));
      break;  // BINGET
    case 'j':
      get(number(4));
      break;  // LONG_BINGET
    case 'q':
      memoize(number(1));
      break;  // BINPUT
    case 'r':
      memoize(number(4));
      break;  // LONG_BINPUT
    case 0x8a:
      integer(number(1));
      break;  // LONG1
    case 0x8b:
      integer(number(4));
      break;  // LONG4
    case 'N':
      push({Type::kNone, 0});
      break;  // NONE
    case 0x88:
      push({Type::kBool, 1});
      break;  // NEWTRUE
    case 0x89:
      push({Type::kBool, 0});
      break;  // NEWFALSE
    case 'G':
      take(8);
      make({Type::kFloat, static_cast<uint32_t>(operand_), 8});
      break;  // BINFLOAT
    case 'C':
      binary(number(1));
      break;  // SHORT_BINBYTES
    case 'B':
      binary(number(4));
      break;    // BINBYTES
    case 0x8e:  // BINBYTES8
    case 0x96:
      binary(number(8));
      break;  // BYTEARRAY8
    case 0x8c:
      text(number(1));
      break;  // SHORT_BINUNICODE
    case 'X':
      text(number(4));
      break;  // BINUNICODE
    case 0x8d:
      text(number(8));
      break;  // BINUNICODE8
    case 0x95:
      frame();
      break;  // FRAME
    case '0':
      drop();
      break;  // POP
    case '1':
      stack_.resize(unmark());
      break;  // POP_MARK
    case '(':
      mark();
      break;  // MARK
    default:
      return false;
  }
  return true;
}

void PickleMachine::compound(uint8_t opcode) {
  switch (opcode) {
    case ')':
      return push({Type::kTuple, kEmptyTuple});  // EMPTY_TUPLE
    case 0x85:                                   // TUPLE1
    case 0x86:                                   // TUPLE2
    case 0x87:                                   // TUPLE3
      count_object();
      return push(cut_tuple(below_top(opcode - 0x84)));
    case 't': {  // TUPLE
      const size_t from = unmark();
      count_object();
      return push(cut_tuple(from));
    }
    case ']':
      return make_list(Type::kList);  // EMPTY_LIST
    case '}':
      return make_list(Type::kDict);  // EMPTY_DICT
    case 0x8f:
      return make_list(Type::kSet);  // EMPTY_SET
    case 'a':
      return extend(Type::kList, below_top(1), "APPEND");  // APPEND
    case 'e':
      return extend(Type::kList, unmark(), "APPEND");  // APPENDS
    case 's':
      return extend(Type::kDict, below_top(2), "SETITEM");  // SETITEM
    case 'u':
      return extend(Type::kDict, unmark(), "SETITEM");  // SETITEMS
    case 0x90:
      return extend(Type::kSet, unmark(), "ADDITEMS");  // ADDITEMS
    case 0x91: {                                        // FROZENSET
      const size_t from = unmark();
      count_items(stack_.size() - from);
      std::vector<PickleValue> items(stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
      stack_.resize(from);
      make_list(Type::kSet);
      lists_.back() = std::move(items);
      return;
    }
    case 0x93:
      return stack_global();  // STACK_GLOBAL
    case 'c': {               // GLOBAL
      const std::string_view module = line();
      return global(module, line());
    }
    case 'R':
      return reduce();  // REDUCE
    case 0x81:
      return new_object();  // NEWOBJ
    case 'b':
      return build();  // BUILD
    case 'Q':
      return persistent();  // BINPERSID
    case kProto:
      malformed("a second PROTO");
    default:
      refused(describe_opcode(opcode));
  }
}

// Moves past `count` bytes and sets `operand_` to the first of them.
void PickleMachine::take(uint64_t count) {
  if (count > pickle_.size() - at_) cut_off();
  operand_ = at_;
  at_ += count;
}

// An unsigned little-endian number.
uint64_t PickleMachine::number(size_t bytes) {
  take(bytes);
  uint64_t value = 0;
  std::memcpy(&value, pickle_.data() + operand_, bytes);
  return value;
}

void PickleMachine::push(PickleValue value) {
  if (stack_.size() >= limits_.stack) limited("more than " + std::to_string(limits_.stack) + " values on its stack");
  stack_.push_back(value);
}

PickleValue PickleMachine::pop() {
  const PickleValue value = top();
  stack_.pop_back();
  return value;
}

PickleValue PickleMachine::top() const {
  if (stack_.size() <= floor()) underflow();
  return stack_.back();
}

// The height of the stack without its `count` topmost values.
size_t PickleMachine::below_top(size_t count) const {
  if (stack_.size() - floor() < count) underflow();
  return stack_.size() - count;
}

void PickleMachine::mark() {
  if (marks_.size() >= limits_.depth) limited("values nest deeper than " + std::to_string(limits_.depth));
  marks_.push_back(stack_.size());
}

// Closes the innermost MARK and returns where its values begin.
size_t PickleMachine::unmark() {
  if (marks_.empty()) malformed("an opcode needs a MARK, and none is open");
  const size_t from = marks_.back();
  marks_.pop_back();
  return from;
}

// As in Python, POP removes a MARK if no value is above it.
void PickleMachine::drop() {
  if (!marks_.empty() && stack_.size() == floor()) {
    unmark();
  } else {
    pop();
  }
}

// Every pickler numbers its memo from 0 on without gaps. Other indices are refused, because they could cost much
// memory.
void PickleMachine::memoize(size_t index) {
  if (index > memo_.size()) {
    malformed("memo " + std::to_string(index) + " is set while " + std::to_string(memo_.size()) + " are in use");
  }
  if (index >= limits_.memo) limited("more than " + std::to_string(limits_.memo) + " values in its memo");
  if (index == memo_.size()) {
    memo_.push_back(top());
  } else {
    memo_[index] = top();
  }
}

void PickleMachine::get(size_t index) {
  if (index >= memo_.size()) malformed("memo " + std::to_string(index) + " is used and not set");
  push(memo_[index]);
}

void PickleMachine::integer(uint64_t length) {
  if (length > kMaxLongBytes) {
    limited("an int of " + std::to_string(length) + " bytes (at most " + std::to_string(kMaxLongBytes) + ")");
  }
  take(length);
  if (length <= 8) {
    uint64_t bits = 0;
    std::memcpy(&bits, pickle_.data() + operand_, length);
    const auto unused = static_cast<int>(64 - 8 * length);
    const int64_t value = length == 0 ? 0 : static_cast<int64_t>(bits << unused) >> unused;
    if (value <= kMaxInteger && value >= -kMaxInteger) return push({Type::kInt, value});
  }
  push({Type::kLong, static_cast<int64_t>(256 * operand_ + length)});
}

void PickleMachine::binary(uint64_t length) {
  take(length);
  make({Type::kBytes, static_cast<uint32_t>(operand_), static_cast<uint32_t>(length)});
}

void PickleMachine::text(uint64_t length) {
  if (length > limits_.text) {
    limited("a string of " + std::to_string(length) + " bytes (at most " + std::to_string(limits_.text) + ")");
  }
  take(length);
  const auto bytes = pickle_.subspan(operand_, length);
  const bool ascii = is_ascii(bytes);
  if (!ascii && !is_utf8(bytes)) malformed("a string is not UTF-8");
  make({Type::kText, static_cast<uint32_t>(operand_), static_cast<uint32_t>(length), ascii ? 1 : 0});
}

void PickleMachine::frame() {
  const uint64_t length = number(8);
  if (op_ < frame_end_) malformed("a FRAME inside another");
  if (length > pickle_.size() - at_) cut_off();
  frame_end_ = at_ + length;
}

}  // namespace refit
