// Tuples, lists, dicts and sets, and the records of calls of names.
#include <algorithm>

#include "codec/pickle_machine.h"
#include "codec/pickle_opcodes.h"
#include "codec/utf8.h"

namespace refit {
namespace {

using Type = PickleType;

constexpr size_t kMaxGlobal = 256;
constexpr uint8_t kPersistentId = 'Q';

std::string spelled(const PickleName& name) { return std::string(name.module) + "." + std::string(name.name); }

std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

void PickleMachine::count_object() {
  if (++object_count_ > limits_.objects) limited("more than " + std::to_string(limits_.objects) + " objects");
}

void PickleMachine::count_items(size_t count) {
  item_count_ += count;
  if (item_count_ > limits_.items) {
    limited("more than " + std::to_string(limits_.items) + " values in its tuples, lists and dicts");
  }
}

PickleValue PickleMachine::add(PickleObject object) {
  objects_.push_back(object);
  return {object.type, static_cast<int64_t>(objects_.size() - 1)};
}

// Pushes an object, which counts against the limit.
void PickleMachine::make(PickleObject object) {
  count_object();
  push(add(object));
}

// Moves the values from `from` on from the stack into a tuple.
PickleValue PickleMachine::cut_tuple(size_t from) {
  const size_t size = stack_.size() - from;
  count_items(size);
  const size_t first = items_.size();
  items_.insert(items_.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
  stack_.resize(from);
  return add({Type::kTuple, static_cast<uint32_t>(first), static_cast<uint32_t>(size)});
}

void PickleMachine::make_list(PickleType type) {
  lists_.emplace_back();
  make({type, static_cast<uint32_t>(lists_.size() - 1)});
}

// Moves the values from `from` on into the list, dict or set below them.
void PickleMachine::extend(PickleType type, size_t from, const char* opcode) {
  const size_t size = stack_.size() - from;
  if (from <= floor()) {
    count_items(size);
    underflow();
  }
  const PickleValue into = stack_[from - 1];
  if (into.type() == Type::kCall && callee(into).use == PickleUse::kAny) {
    count_object();
    keeps(into, cut_tuple(from));
    return;
  }
  count_items(size);
  if (into.type() != type) {
    malformed(opcode + std::string(type == Type::kDict ? " on " : " to ") + describe(into));
  }
  if (type == Type::kDict && size % 2 != 0) malformed("SETITEMS with a key and no value");
  std::vector<PickleValue>& items = lists_[object(into).at];
  items.insert(items.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
  stack_.resize(from);
}

std::string_view PickleMachine::line() {
  const auto rest = pickle_.subspan(at_);
  const auto end = std::find(rest.begin(), rest.end(), '\n');
  if (end == rest.end()) cut_off();
  const auto size = static_cast<size_t>(end - rest.begin());
  if (size > kMaxGlobal) {
    malformed("a name of " + std::to_string(size) + " bytes (at most " + std::to_string(kMaxGlobal) + ")");
  }
  if (!is_utf8(rest.first(size))) malformed("a string is not UTF-8");
  at_ += size + 1;
  return {reinterpret_cast<const char*>(rest.data()), size};
}

void PickleMachine::stack_global() {
  const PickleValue name = pop(), module = pop();
  if (name.type() != Type::kText || module.type() != Type::kText) malformed("STACK_GLOBAL without two strings");
  // The length is limited because thousands of names may use a text that occurs once in the pickle.
  const size_t longest = std::max(object(name).size, object(module).size);
  if (longest > kMaxGlobal) {
    const size_t length = std::max(utf16_length(as_bytes(text(name))), utf16_length(as_bytes(text(module))));
    if (length > kMaxGlobal) {
      malformed("a name of " + std::to_string(length) + " characters (at most " + std::to_string(kMaxGlobal) + ")");
    }
  }
  global(text(module), text(name));
}

void PickleMachine::global(std::string_view module, std::string_view name) {
  push({Type::kName, static_cast<int64_t>(find(module, name))});
}

size_t PickleMachine::find(std::string_view module, std::string_view name) {
  const std::pair<std::string_view, std::string_view> key{module, name};
  if (const auto known = name_index_.find(key); known != name_index_.end()) return known->second;
  if (names_.size() >= limits_.names) limited("more than " + std::to_string(limits_.names) + " different names");
  const PickleMeaning meaning = find_name_(module, name);
  if (!meaning.known) refused(meaning.reason);
  names_.push_back({module, name, meaning.use, meaning.role});
  name_index_.emplace(key, names_.size() - 1);
  return names_.size() - 1;
}

// A persistent id refers to data outside the pickle. It is accepted only if the caller has a name for it.
void PickleMachine::persistent() {
  if (!persistent_name_) {
    const PickleMeaning meaning = find_name_("pickle", "persistent_load");
    if (!meaning.known || meaning.use != PickleUse::kCall) refused(describe_opcode(kPersistentId));
    // find() would look the name up a second time, and the caller numbers names by its calls.
    names_.push_back({"pickle", "persistent_load", meaning.use, meaning.role});
    persistent_name_ = names_.size() - 1;
  }
  below_top(1);
  count_object();
  items_.push_back(pop());
  make_call(*persistent_name_, add({Type::kTuple, static_cast<uint32_t>(items_.size() - 1), 1}));
}

void PickleMachine::reduce() {
  const PickleValue args = pop(), callee = pop();
  if (callee.type() != Type::kName) refused("REDUCE calls " + describe(callee) + ", which is not a known function");
  if (args.type() != Type::kTuple) malformed("REDUCE with " + describe(args) + " for a tuple");
  const PickleName& called = name(callee);
  if (called.use == PickleUse::kCall || called.use == PickleUse::kAny) {
    make_call(callee.index(), args);
  } else if (!reduce_plain(called, args)) {
    refused(spelled(called) + " with arguments that no pickler writes");
  }
}

// Pushes the value of the calls with which Python writes bytes, sets, dicts and tuples. Returns false for other
// arguments.
bool PickleMachine::reduce_plain(const PickleName& callee, PickleValue args) {
  const auto given = items(args);
  const PickleValue only = given.size() == 1 ? given[0] : PickleValue();
  const auto same = [&] {
    count_object();
    push(only);
    return true;
  };
  switch (callee.use) {
    case PickleUse::kTuple:
      return only.type() == Type::kTuple && same();
    case PickleUse::kDict:
      if (!given.empty()) return false;
      make_list(Type::kDict);
      return true;
    case PickleUse::kSet:
      if (only.type() != Type::kList) return false;
      make({Type::kSet, object(only).at});
      return true;
    case PickleUse::kBytes:
      if (!given.empty()) return (only.type() == Type::kBytes || only.type() == Type::kEncoded) && same();
      make({Type::kEncoded, static_cast<uint32_t>(encoded_.size()), 0});
      return true;
    case PickleUse::kLatin1:
      if (given.size() != 2 || given[0].type() != Type::kText || given[1].type() != Type::kText) return false;
      if (text(given[1]) != "latin1") return false;
      encode(given[0]);
      return true;
    default:
      refused("REDUCE calls " + spelled(callee) + ", which stands for itself only");
  }
}

// Protocol 2 writes bytes as text with one character for each byte.
void PickleMachine::encode(PickleValue value) {
  const auto from = as_bytes(text(value));
  const size_t length = utf16_length(from);
  if (length > encode_budget_) limited("more bytes come out of its strings than it has");
  encode_budget_ -= length;
  const size_t first = encoded_.size();
  for (size_t at = 0; at < from.size(); at++) {
    if (from[at] < 0x80) {
      encoded_.push_back(from[at]);
    } else {
      if (from[at] > 0xc3) malformed("bytes as text hold a character past U+00FF");
      encoded_.push_back(static_cast<uint8_t>(from[at] << 6 | (from[at + 1] & 0x3f)));
      at++;
    }
  }
  make({Type::kEncoded, static_cast<uint32_t>(first), static_cast<uint32_t>(length)});
}

void PickleMachine::new_object() {
  const PickleValue args = pop(), made = pop();
  const bool known =
      made.type() == Type::kName && (name(made).use == PickleUse::kClass || name(made).use == PickleUse::kAny);
  if (!known) refused("NEWOBJ of " + describe(made) + ", which is not a known class");
  if (args.type() != Type::kTuple) malformed("NEWOBJ with " + describe(args) + " for a tuple");
  make_call(made.index(), args);
}

// A record that may get more values later has a copy of its arguments. The copy counts against the limits, because
// thousands of records may use one tuple.
void PickleMachine::make_call(size_t name, PickleValue args) {
  PickleValue own = args;
  if (names_[name].use == PickleUse::kAny) {
    const auto given = items(args);
    count_items(given.size());
    lists_.emplace_back(given.begin(), given.end());
    own = add({Type::kList, static_cast<uint32_t>(lists_.size() - 1)});
  }
  make({Type::kCall, static_cast<uint32_t>(name), static_cast<uint32_t>(own.index())});
}

void PickleMachine::build() {
  const PickleValue state = pop(), built = top();
  if (keeps(built, state)) return;
  if (built.type() != Type::kCall || callee(built).use != PickleUse::kClass) refused("BUILD on " + describe(built));
  if (state.type() != Type::kDict) refused("BUILD with " + describe(state) + " for a dict");
  if (object(built).more != -1) refused("BUILD for a second time on one object");
  objects_[built.index()].more = static_cast<int32_t>(state.index());
}

// A record of a name of use kAny keeps every value that it is given.
bool PickleMachine::keeps(PickleValue record, PickleValue given) {
  if (record.type() != Type::kCall || callee(record).use != PickleUse::kAny) return false;
  lists_[objects_[object(record).size].at].push_back(given);
  return true;
}

}  // namespace refit
