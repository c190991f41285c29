// The only reader of pickles. A pickle is a program for a stack machine. This machine knows only the opcodes that build
// data (protocols 2 to 5; Lib/pickletools.py describes each). Opcodes that import a name in Python look it up in the
// caller's closed set here. Opcodes that call it in Python record the call here. Nothing recurses, and each opcode
// takes time and memory in proportion to its own bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codec/pickle_value.h"

namespace refit {

// Called once for each different name of a pickle.
using FindName = std::function<PickleMeaning(std::string_view module, std::string_view name)>;

class PickleMachine {
 public:
  // `pickle` and `find_name` must outlive the machine and its values.
  PickleMachine(std::span<const uint8_t> pickle, const FindName& find_name, const PickleLimits& limits = {});

  // Reads the whole pickle. Throws PickleError and the exceptions of `find_name`.
  void run();

  // The value that is left after `run`.
  PickleValue root() const { return stack_[0]; }

  const PickleObject& object(PickleValue value) const { return objects_[value.index()]; }
  const PickleName& name(PickleValue value) const { return names_[value.index()]; }
  // The items of a tuple, list or set; the alternating keys and values of a dict.
  std::span<const PickleValue> items(PickleValue value) const { return items(object(value)); }
  std::span<const PickleValue> items(const PickleObject& object) const;
  // The name and the arguments of a call.
  const PickleName& callee(PickleValue call) const { return names_[object(call).at]; }
  std::span<const PickleValue> arguments(PickleValue call) const { return items(objects_[object(call).size]); }
  // A text as UTF-8, and bytes.
  std::string_view text(PickleValue value) const;
  std::span<const uint8_t> bytes(PickleValue value) const;

  const std::vector<PickleObject>& objects() const { return objects_; }
  const std::vector<PickleName>& names() const { return names_; }
  // `PickleObject::at` is an index of these: of the first for tuples, of the second for lists, dicts and sets, of the
  // third for encoded bytes.
  const std::vector<PickleValue>& tuple_items() const { return items_; }
  const std::vector<std::vector<PickleValue>>& lists() const { return lists_; }
  const std::vector<uint8_t>& encoded() const { return encoded_; }

 private:
  [[noreturn]] void malformed(std::string message) const;
  [[noreturn]] void refused(std::string message) const;
  [[noreturn]] void limited(std::string message) const;
  [[noreturn]] void cut_off() const;
  [[noreturn]] void underflow() const;
  std::string describe(PickleValue value) const;

  void start();
  void stop();
  // `scalar` runs the opcodes of numbers, strings, the memo and the stack, `compound` the others. `scalar` returns
  // false for an opcode that is not one of its own.
  bool scalar(uint8_t opcode);
  void compound(uint8_t opcode);

  void take(uint64_t count);
  uint64_t number(size_t bytes);
  void push(PickleValue value);
  PickleValue pop();
  PickleValue top() const;
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  size_t below_top(size_t count) const;
  void mark();
  size_t unmark();
  void drop();
  void memoize(size_t index);
  void get(size_t index);

  void count_object();
  void count_items(size_t count);
  PickleValue add(PickleObject object);
  void make(PickleObject object);
  PickleValue cut_tuple(size_t from);
  void make_list(PickleType type);
  void extend(PickleType type, size_t from, const char* opcode);

  void integer(uint64_t length);
  void text(uint64_t length);
  void binary(uint64_t length);
  void frame();

  std::string_view line();
  void global(std::string_view module, std::string_view name);
  void stack_global();
  size_t find(std::string_view module, std::string_view name);
  void persistent();
  void reduce();
  bool reduce_plain(const PickleName& callee, PickleValue args);
  void encode(PickleValue text);
  void new_object();
  void make_call(size_t name, PickleValue args);
  void build();
  bool keeps(PickleValue record, PickleValue given);

  const std::span<const uint8_t> pickle_;
  const FindName& find_name_;
  const PickleLimits limits_;
  // Positions in the pickle: of the current opcode, of the operand that was taken last, and of the next byte to read.
  size_t op_ = 0, operand_ = 0, at_ = 0;
  size_t frame_end_ = 0;
  size_t object_count_ = 0, item_count_ = 0;
  std::vector<PickleValue> stack_;
  // Stack heights at the open MARKs. Opcodes cannot reach values below the innermost one.
  std::vector<size_t> marks_;
  std::vector<PickleValue> memo_;
  std::vector<PickleObject> objects_;
  std::vector<PickleValue> items_;
  std::vector<std::vector<PickleValue>> lists_;
  std::vector<uint8_t> encoded_;
  // The number of bytes that may still be decoded from strings. A pickler writes a string once and decodes it once.
  size_t encode_budget_;
  std::vector<PickleName> names_;
  // A tree and not a hash table, because the sender chooses the keys and could choose them to collide.
  std::map<std::pair<std::string_view, std::string_view>, size_t> name_index_;
  // The name that BINPERSID calls, once it has been found.
  std::optional<size_t> persistent_name_;
};

}  // namespace refit
