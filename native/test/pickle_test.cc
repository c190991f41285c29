// The reader of pickles under sanitizers. Each limit is exact, and no cut, changed or joined pickle makes it read
// beyond its memory or leave tables with wrong indices.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "codec/pickle_machine.h"
#include "codec/pickle_tree.h"
#include "codec/utf8.h"

using namespace refit;
using namespace std::string_literals;

namespace {

using Kind = PickleError::Kind;

// `use` is the use of every name; without a value all names are refused.
std::optional<PickleUse> use_of_names = PickleUse::kAny;

PickleMeaning find_name(std::string_view, std::string_view name) {
  if (name == "Size") return {true, PickleUse::kTuple};
  if (name == "encode") return {true, PickleUse::kLatin1};
  if (name == "set") return {true, PickleUse::kSet};
  if (name == "OrderedDict") return {true, PickleUse::kDict};
  if (name == "bytes") return {true, PickleUse::kBytes};
  if (!use_of_names) return {false, {}, 0, "no name is known"};
  return {true, *use_of_names};
}

std::string text(const std::string& data) { return "\x8c"s + static_cast<char>(data.size()) + data; }
std::string global(const std::string& module, const std::string& name) { return text(module) + text(name) + "\x93"; }
std::string pickle(const std::string& body) { return "\x80\x04"s + body + "."; }

// Checks that all indices and ranges are inside the tables, and that tuples contain only objects of lower rows.
bool is_sound(const PickleTree& tree, size_t pickle_size, size_t names) {
  const size_t rows = tree.objects.size() / 4;
  const auto value_ok = [&](PickleValue value, size_t below) {
    if (value.type() <= PickleType::kInt) return true;
    if (value.type() == PickleType::kLong) return value.index() / 256 + value.index() % 256 <= pickle_size;
    if (value.type() == PickleType::kName) return value.index() < names;
    return value.index() < below && tree.objects[4 * value.index()] == static_cast<int32_t>(value.type());
  };
  const auto range_ok = [](size_t at, size_t size, size_t end) { return at <= end && size <= end - at; };
  for (size_t row = 0; row < rows; row++) {
    const auto type = static_cast<PickleType>(tree.objects[4 * row]);
    const auto at = static_cast<size_t>(tree.objects[4 * row + 1]),
               size = static_cast<size_t>(tree.objects[4 * row + 2]);
    const int32_t more = tree.objects[4 * row + 3];
    switch (type) {
      case PickleType::kText:
      case PickleType::kBytes:
      case PickleType::kFloat:
        if (!range_ok(at, size, pickle_size)) return false;
        break;
      case PickleType::kEncoded:
        if (!range_ok(at, size, tree.encoded.size())) return false;
        break;
      case PickleType::kCall:
        if (at >= names || size >= row || more >= static_cast<int32_t>(rows)) return false;
        break;
      default:
        if (!range_ok(at, size, tree.values.size())) return false;
        if (type == PickleType::kDict && size % 2 != 0) return false;
        for (size_t index = at; index < at + size; index++) {
          if (!value_ok(tree.values[index], type == PickleType::kTuple ? row : rows)) return false;
        }
    }
  }
  return value_ok(tree.root, rows);
}

// Reads a copy of exactly the right size, so the sanitizer sees a read beyond the end. Returns the error, if any.
std::optional<Kind> read(const std::string& bytes, const PickleLimits& limits = {}) {
  const auto memory = std::make_unique<uint8_t[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), memory.get());
  const FindName find = find_name;
  PickleMachine machine({memory.get(), bytes.size()}, find, limits);
  try {
    machine.run();
  } catch (const PickleError& error) {
    CHECK(error.at <= bytes.size() && !error.message.empty());
    return error.kind;
  }
  CHECK(machine.objects().size() <= 2 * limits.objects + bytes.size());
  CHECK(is_sound(to_tree(machine), bytes.size(), machine.names().size()));
  return std::nullopt;
}

// Samples with every supported opcode.
const std::array<std::string, 14>& samples() {
  static const std::array<std::string, 14> all = {
      pickle("](K\x01M\x02\x01J\x03\x01\x01\xff\x8a\x09\x01\x02\x03\x04\x05\x06\x07\x08\x09N\x88\x89"
             "e"),
      pickle(")\x85\x94h\x00\x86h"s + '\0' + "\x86"),
      pickle("}\x94("s + text("key") + "G\x3f\xf0\0\0\0\0\0\0"s + text("more") + "h"s + '\0' + "u"),
      pickle("}"s + text("a") + "K\x01s"),
      pickle("\x8f\x94(K\x01K\x02\x90"),
      pickle("(K\x01K\x02\x91"),
      pickle(global("torch", "Size") + "K\x01\x85\x85R"),
      pickle(global("_codecs", "encode") + text("a\xc3\xbf") + text("latin1") + "\x86R"),
      pickle(global("builtins", "set") + "](K\x01K\x02"
                                         "e\x85R"),
      pickle(global("a", "anything") + "K\x01\x85R\x94}b(NNe(NNu"),
      pickle("cmodule\nname\n)\x81"),
      pickle("K\x01(K\x02"
             "0"
             "0(K\x03"
             "1"),
      pickle("C\x03"
             "abcB\x02\0\0\0"
             "abq\0X\x01\0\0\0zr\x01\0\0\0j\0\0\0\0\x87\x86"s),
      pickle("\x95\x09\0\0\0\0\0\0\0"s + "\x8d\x01\0\0\0\0\0\0\0"s + "a\x8e\x01\0\0\0\0\0\0\0"s + "b\x86"s),
  };
  return all;
}

void every_sample_is_read() {
  for (const std::string& sample : samples()) CHECKF(!read(sample), "sample %td", &sample - samples().data());
}

void a_pickle_that_is_cut_off_is_malformed() {
  for (const std::string& sample : samples()) {
    for (size_t size = 0; size < sample.size(); size++) CHECK(read(sample.substr(0, size)) == Kind::kMalformed);
    CHECK(read(sample + ".") == Kind::kMalformed);
  }
}

void a_pickle_with_any_byte_changed_is_read_safely() {
  for (const std::string& sample : samples()) {
    for (size_t at = 0; at < sample.size(); at++) {
      for (int value = 0; value < 256; value++) {
        std::string changed = sample;
        changed[at] = static_cast<char>(value);
        read(changed);
      }
    }
  }
}

void pieces_may_follow_each_other(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](size_t count) { return static_cast<size_t>(random() % count); };
  std::string body;
  for (size_t left = 1 + below(20); left > 0; left--) {
    const std::string& from = samples()[below(samples().size())];
    const size_t at = below(from.size());
    body += below(3) == 0 ? std::string(1, static_cast<char>(random())) : from.substr(at, below(12));
  }
  use_of_names = static_cast<PickleUse>(below(kPickleUses));
  read(pickle(body));
  use_of_names = PickleUse::kAny;
}

void each_limit_is_exact() {
  const auto holds = [](const char* what, const std::string& bytes, size_t PickleLimits::*limit, size_t value) {
    PickleLimits limits;
    limits.*limit = value;
    CHECKF(!read(bytes, limits), "%s of %zu", what, value);
    limits.*limit = value - 1;
    CHECKF(read(bytes, limits) == Kind::kLimit, "%s of %zu", what, value - 1);
  };
  holds("bytes", pickle("N"), &PickleLimits::bytes, 4);
  holds("memo", pickle("N\x94\x94\x94"), &PickleLimits::memo, 3);
  holds("objects", pickle("](]]}e"), &PickleLimits::objects, 4);
  holds("items",
        pickle("]N\x85"
               "aNa"),
        &PickleLimits::items, 3);
  holds("stack", pickle("(NNNNNt"), &PickleLimits::stack, 5);
  holds("depth", pickle("(((ttt"), &PickleLimits::depth, 3);
  holds("text", pickle(text("abcde")), &PickleLimits::text, 5);
  holds("names", pickle(global("a", "b") + global("a", "c") + global("a", "b") + "\x87"), &PickleLimits::names, 2);
}

// Names and memo entries are cheap to repeat, and their values are stored once.
void repeated_values_are_stored_once() {
  std::string body = text("module") + "\x94" + text("name") +
                     "\x94"
                     "0"
                     "0(";
  for (int i = 0; i < 100'000; i++) body += "h\0h\x01\x93"s;
  const std::string bytes = pickle(body + "t");
  const FindName find = find_name;
  PickleMachine machine({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, find);
  machine.run();
  CHECK(machine.names().size() == 1 && machine.objects().size() == 4);
  CHECK(machine.items(machine.root()).size() == 100'000);
}

void a_refused_name_is_reported() {
  use_of_names.reset();
  CHECK(read(pickle(global("os", "system"))) == Kind::kRefused);
  CHECK(read(pickle(global("torch", "Size"))) == std::nullopt);
  use_of_names = PickleUse::kAny;
}

void utf8_is_told_from_other_bytes() {
  const auto ok = [](const std::string& text) {
    return is_utf8({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  };
  for (const char* good : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    CHECKF(ok(good), "%s", good);
  }
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe0\xa0",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3\x28"}) {
    CHECKF(!ok(bad), "%s", bad);
  }
}

}  // namespace

int main() {
  every_sample_is_read();
  a_pickle_that_is_cut_off_is_malformed();
  a_pickle_with_any_byte_changed_is_read_safely();
  for (uint64_t seed = 0; seed < 30'000; seed++) pieces_may_follow_each_other(seed);
  each_limit_is_exact();
  repeated_values_are_stored_once();
  a_refused_name_is_reported();
  utf8_is_told_from_other_bytes();
  return refit::test::finish("pickle_test");
}
