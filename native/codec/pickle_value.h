// The values of a pickle, in tables. They are inert data and refer only to each other and to the bytes of the pickle.
// src/wire/pickle/read.ts builds JavaScript values from the same tables.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace refit {

// The numbers are those of PICKLE_TYPES in src/native/pickle.ts.
enum class PickleType : uint8_t {
  // These hold the value itself: nothing, 0 or 1, an int of at most 53 bits.
  kNone,
  kBool,
  kInt,
  // A longer int: 256 * (position of its bytes in the pickle) + number of bytes (two's complement, little-endian).
  kLong,
  // The index of a name.
  kName,
  // The others hold the index of an object.
  kText,
  kBytes,
  kEncoded,  // bytes that were written as text
  kFloat,
  kTuple,
  kList,
  kDict,
  kSet,
  kCall
};

// 8 bytes: the type in the lowest one, then 56 bits of two's complement.
class PickleValue {
 public:
  PickleValue() : PickleValue(PickleType::kNone, 0) {}
  PickleValue(PickleType type, int64_t payload)
      : bits_(static_cast<uint64_t>(payload) << 8 | static_cast<uint64_t>(type)) {}

  PickleType type() const { return static_cast<PickleType>(bits_ & 0xff); }
  int64_t integer() const { return static_cast<int64_t>(bits_) >> 8; }
  size_t index() const { return static_cast<size_t>(bits_ >> 8); }
  uint64_t bits() const { return bits_; }

 private:
  uint64_t bits_;
};
static_assert(sizeof(PickleValue) == 8);

// One row of the table of objects.
struct PickleObject {
  PickleType type;
  // Text, bytes and floats: the first byte in the pickle. Encoded bytes: the first byte in PickleMachine::encoded(). A
  // tuple: its first item. A list, dict or set: the index of its list of items (a dict has alternating keys and
  // values). A call: its name.
  uint32_t at = 0;
  // Bytes, or items of a tuple. A call: the object that holds its arguments, a tuple or a list.
  uint32_t size = 0;
  // Text: 1 if all of it is ASCII. A call: the dict of its BUILD opcode, or -1.
  int32_t more = -1;
};

// The permitted use of a name of the closed set: `PickleUse` in src/wire/pickle/values.ts, in the same order.
enum class PickleUse : uint8_t { kValue, kCall, kClass, kTuple, kDict, kSet, kBytes, kLatin1, kAny };
constexpr int kPickleUses = 9;

struct PickleName {
  // Views of the pickle, or constants.
  std::string_view module, name;
  PickleUse use;
  // The caller's own number for the name.
  int role = 0;
};

// A caller's answer for a name: its use or, if `known` is false, the reason for the refusal.
struct PickleMeaning {
  bool known;
  PickleUse use = PickleUse::kValue;
  int role = 0;
  std::string reason = {};
};

struct PickleError {
  enum class Kind : uint8_t { kMalformed, kRefused, kLimit };

  Kind kind;
  // The position of the wrong opcode.
  size_t at;
  std::string message;
};

// At least eight times the need of a request with 18,867 handles. The records take about 300 MB at most.
struct PickleLimits {
  // Bytes of the whole pickle.
  size_t bytes = size_t{256} << 20;
  // Values in the memo.
  size_t memo = size_t{1} << 21;
  // Tuples, lists, dicts, sets, records, floats, strings and bytes.
  size_t objects = size_t{1} << 21;
  // Values in all tuples, lists, dicts and sets together.
  size_t items = size_t{1} << 23;
  // Values on the stack at once.
  size_t stack = size_t{1} << 20;
  // MARKs open at once: how deep groups of values nest.
  size_t depth = 64;
  // Bytes of one string.
  size_t text = size_t{1} << 20;
  // Different global names.
  size_t names = size_t{1} << 16;
};

}  // namespace refit
