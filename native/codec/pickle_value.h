// What a pickle is read into: inert values, in tables. Nothing in them refers to anything but other values and the
// bytes that were read. src/wire/pickle/read.ts builds JavaScript values from the same tables.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace refit {

// The numbers are those of PICKLE_TYPES in src/native/pickle.ts.
enum class PickleType : uint8_t {
  // The value itself: nothing, 0 or 1, an int of at most 53 bits.
  kNone,
  kBool,
  kInt,
  // A longer int: 256 * (where its bytes begin in the pickle) + how many there are (two's complement, little-endian).
  kLong,
  // The index of a name.
  kName,
  // And the rest are indices of objects.
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
  // Text, bytes and floats: the first byte in the pickle; encoded bytes: in those that were encoded. A tuple: its first
  // item. A list, dict or set: which list of items (a dict has keys and values in turn). A call: its name.
  uint32_t at = 0;
  // Bytes, or items of a tuple. A call: the object that holds its arguments, a tuple or a list.
  uint32_t size = 0;
  // Text: 1 where all of it is ASCII. A call: the dict that BUILD gave it, or -1.
  int32_t more = -1;
};

// What a name of the closed set may be used for: `PickleUse` in src/wire/pickle/values.ts, in the same order.
enum class PickleUse : uint8_t { kValue, kCall, kClass, kTuple, kDict, kSet, kBytes, kLatin1, kAny };
constexpr int kPickleUses = 9;

struct PickleName {
  // They lie in the pickle, or are constants.
  std::string_view module, name;
  PickleUse use;
  // Whatever the caller tells its names apart by.
  int role = 0;
};

// What a caller answers for a name: its use, or, with `known` false, why it is refused.
struct PickleMeaning {
  bool known;
  PickleUse use = PickleUse::kValue;
  int role = 0;
  std::string reason = {};
};

struct PickleError {
  enum class Kind : uint8_t { kMalformed, kRefused, kLimit };

  Kind kind;
  // The byte of the opcode at fault.
  size_t at;
  std::string message;
};

// At least eight times what a request of 18,867 handles takes, and some 300 MB of records at worst.
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
