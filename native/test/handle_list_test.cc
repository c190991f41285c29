// The reader of handle lists under sanitizers. It reads a whole list, and no cut, changed or joined pickle makes it
// read beyond its memory.
#include "codec/handle_list.h"

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"

using namespace refit;

namespace {

using Bytes = std::vector<uint8_t>;

HandleRole role_of(std::string_view module, std::string_view name) {
  if (name == "rebuild") return HandleRole::kRebuild;
  if (name == "Size") return HandleRole::kTuple;
  if (name == "Tensor") return HandleRole::kTensorClass;
  if (name == "Storage") return HandleRole::kStorageClass;
  if (module == "torch" && name == "bfloat16") return refit::role_of(DType::kBFloat16);
  if (module == "torch" && name == "float32") return refit::role_of(DType::kFloat32);
  return HandleRole::kUnknown;
}

void add(Bytes& out, std::string_view text) { out.insert(out.end(), text.begin(), text.end()); }

void number(Bytes& out, uint64_t value) {
  add(out, {"\x8a\x08", 2});
  for (int byte = 0; byte < 8; byte++) out.push_back(static_cast<uint8_t>(value >> (8 * byte)));
}

void bytes(Bytes& out, std::string_view data) {
  add(out, "C");
  out.push_back(static_cast<uint8_t>(data.size()));
  add(out, data);
}

void text(Bytes& out, std::string_view data) {
  add(out, "\x8c");
  out.push_back(static_cast<uint8_t>(data.size()));
  add(out, data);
}

void name(Bytes& out, std::string_view module, std::string_view name) {
  text(out, module);
  text(out, name);
  add(out, "\x93");
}

// The name of a pair and the start of the call that rebuilds its tensor, up to the sizes.
void begin_tensor(Bytes& out, const std::string& called) {
  text(out, called);
  name(out, "torch", "rebuild");
  add(out, "(");
  name(out, "torch", "Tensor");
  name(out, "torch", "Size");
}

// One tensor, whose numbers are computed from its index.
struct Sent {
  int rows, cols, start, segment, slot;
  bool is_float;
};

Sent sent(int index) { return {index % 7 + 1, index % 5 + 1, index % 3, index / 4, index, index % 2 == 1}; }

// The numbers of a tensor as torch pickles them.
struct Fields {
  uint64_t rows, cols, row_step, col_step, start, bytes, offset, slot;
  int segment, event;
  bool is_float;
};

void add_tensor(Bytes& out, const std::string& called, const Fields& f) {
  begin_tensor(out, called);
  add(out, "(");
  number(out, f.rows);
  number(out, f.cols);
  add(out, "t\x85R(");
  number(out, f.row_step);
  number(out, f.col_step);
  add(out, "t");
  number(out, f.start);
  name(out, "torch", "Storage");
  name(out, "torch", f.is_float ? "float32" : "bfloat16");
  add(out, {"K\x03", 2});
  bytes(out, std::string(64, static_cast<char>(f.segment)));
  number(out, f.bytes);
  number(out, f.offset);
  add(out, "\x89");
  bytes(out, "/counter");
  number(out, f.slot);
  bytes(out, std::string(64, static_cast<char>(f.event)));
  add(out, "\x88tR\x86");
}

Bytes pickle_with(const std::vector<Fields>& tensors, int first = 0) {
  Bytes out;
  add(out, {"\x80\x04](", 4});
  for (size_t i = 0; i < tensors.size(); i++) add_tensor(out, "layer." + std::to_string(first + i), tensors[i]);
  add(out, "e.");
  return out;
}

Bytes pickle_of(int first, int count) {
  std::vector<Fields> tensors;
  for (int index = first; index < first + count; index++) {
    const auto [rows, cols, start, segment, slot, is_float] = sent(index);
    const auto width = static_cast<uint64_t>(cols);
    tensors.push_back({static_cast<uint64_t>(rows), width, width, 1, static_cast<uint64_t>(start), 1000,
                       static_cast<uint64_t>(1000 * index), static_cast<uint64_t>(slot), segment, index % 2, is_float});
  }
  return pickle_with(tensors, first);
}

std::optional<HandleList> read(const std::vector<Bytes>& pickles) {
  // Copies of exactly the right size, so the sanitizer sees a read beyond the end.
  std::vector<std::unique_ptr<uint8_t[]>> memory;
  std::vector<std::span<const uint8_t>> spans;
  for (const Bytes& pickle : pickles) {
    memory.push_back(std::make_unique<uint8_t[]>(pickle.size()));
    std::copy(pickle.begin(), pickle.end(), memory.back().get());
    spans.emplace_back(memory.back().get(), pickle.size());
  }
  return read_handle_list(spans, role_of);
}

void a_list_is_read_whole() {
  const int first = 0, count = 40, more = 25;
  const auto list = read({pickle_of(first, count), pickle_of(count, more)});
  if (!CHECK(list.has_value())) return;
  CHECK(list->ends == (std::vector<int32_t>{count, count + more}));
  CHECK(list->devices.size() == 1 && std::get<int64_t>(list->devices[0]) == 3);
  int32_t end = 0;
  for (int index = 0; index < count + more; index++) {
    const auto [rows, cols, start, segment, slot, is_float] = sent(index);
    const auto at = static_cast<size_t>(index);
    const std::string name =
        list->names.substr(static_cast<size_t>(end), static_cast<size_t>(list->name_ends[at] - end));
    end = list->name_ends[at];
    CHECKF(name == "layer." + std::to_string(index), "%s", name.c_str());
    CHECK(list->dims[at] == 2 && list->sizes[2 * at] == rows && list->sizes[2 * at + 1] == cols);
    CHECK(list->dtypes[at] == (is_float ? 2 : 0));
    CHECKF(list->segments[at] == segment, "tensor %d in segment %d", index, list->segments[at]);
    CHECK(list->offsets[at] == 1000.0 * index + start * (is_float ? 4 : 2));
    CHECK(list->counters.at(0).slots[at] == slot);
  }
  for (size_t segment = 0; segment < list->segment_list.size(); segment++) {
    const HandleSegment& found = list->segment_list[segment];
    CHECK(found.handle == std::string(64, static_cast<char>(segment)));
    // Four tensors have the two events; each event is listed once.
    CHECK(found.events.size() == std::min<size_t>(2, static_cast<size_t>(count + more) - 4 * segment));
  }
  CHECK(list->segment_list[0].end == 4000);
}

// Such lists are read by src/wire/torch, which names the mistake or knows the form.
void lists_of_another_form_are_declined() {
  // 4 x 8 elements of 2 bytes, which fill the storage from its third element on.
  const Fields good = {4, 8, 8, 1, 2, 68, 512, 5, 0, 0, false};
  const auto declined = [&](const char* what, auto change) {
    Fields other = good;
    other.slot = 6;
    change(other);
    CHECKF(!read({pickle_with({good, other})}), "%s", what);
  };
  CHECK(read({pickle_with({good})}));
  Fields same = good;
  CHECK(read({pickle_with({good, same})}));
  declined("one element behind the storage", [](Fields& f) { f.start++; });
  declined("a storage that is one byte short", [](Fields& f) { f.bytes--; });
  declined("a wider dtype", [](Fields& f) { f.is_float = true; });
  declined("gaps between two rows", [](Fields& f) { f = {2, 8, 9, 1, 0, 68, 512, 6, 0, 0, false}; });
  declined("gaps between many rows", [](Fields& f) { f = {3, 8, 9, 1, 0, 68, 512, 6, 0, 0, false}; });
  declined("gaps between two columns", [](Fields& f) { f = {4, 2, 4, 2, 0, 68, 512, 6, 0, 0, false}; });
  declined("an expanded tensor", [](Fields& f) { f.row_step = 0; });
  declined("no elements", [](Fields& f) { f.rows = 0; });
  declined("a slot behind the counter file", [](Fields& f) { f.slot = 10'000; });
  declined("an end beyond 2^53", [](Fields& f) { f.offset = (uint64_t{1} << 53) - 60; });
  declined("a slot of two segments", [](Fields& f) { f = {4, 8, 8, 1, 2, 68, 512, 5, 1, 0, false}; });
  declined("a slot of two offsets", [](Fields& f) { f = {4, 8, 8, 1, 2, 68, 514, 5, 0, 0, false}; });
  declined("a slot of two sizes", [](Fields& f) { f = {4, 8, 8, 1, 2, 70, 512, 5, 0, 0, false}; });
  // Two pickles have a reference each, and one slot counts one.
  CHECK(!read({pickle_with({good}), pickle_with({same})}));
  CHECK(!read({}));
  CHECK(!read({pickle_with({})}));
  // The distance of an axis with one element is not used.
  CHECK(read({pickle_with({{1, 8, 77, 1, 0, 68, 512, 5, 0, 0, false}, {8, 1, 1, 77, 0, 68, 512, 6, 0, 0, false}})}));
}

void a_pickle_that_is_cut_off_is_refused() {
  const Bytes whole = pickle_of(0, 3);
  for (size_t size = 0; size < whole.size(); size++)
    CHECK(!read({Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size))}));
  CHECK(read({whole}));
}

void a_list_with_any_byte_changed_is_read_safely() {
  const Bytes whole = pickle_of(0, 2);
  for (size_t at = 0; at < whole.size(); at++) {
    for (int value = 0; value < 256; value++) {
      Bytes changed = whole;
      changed[at] = static_cast<uint8_t>(value);
      const auto list = read({changed});
      if (list) CHECK(list->name_ends.size() == list->dims.size() && list->offsets.size() == list->dims.size());
    }
  }
}

void pieces_of_lists_do_no_harm(uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::array<Bytes, 2> wholes = {pickle_of(0, 3), pickle_of(100, 2)};
  const auto below = [&](size_t count) { return static_cast<size_t>(random() % count); };
  Bytes out = {0x80, 4};
  for (size_t left = 1 + below(12); left > 0; left--) {
    const Bytes& from = wholes[below(2)];
    const size_t at = below(from.size()), size = below(std::min<size_t>(from.size() - at, 200));
    if (below(4) == 0) {
      out.push_back(static_cast<uint8_t>(random()));
    } else {
      out.insert(out.end(), from.begin() + static_cast<ptrdiff_t>(at),
                 from.begin() + static_cast<ptrdiff_t>(at + size));
    }
  }
  out.push_back('.');
  read({out, wholes[0]});
}

// Tensors that all use one long value of the memo, each on its own GPU.
Bytes pickle_of_one_handle(size_t handle_bytes, int count) {
  Bytes out;
  add(out, {"\x80\x04](", 4});
  for (int index = 0; index < count; index++) {
    begin_tensor(out, "t" + std::to_string(index));
    add(out, "(K\x01t\x85R(K\x01tK");
    out.push_back(0);
    name(out, "torch", "Storage");
    name(out, "torch", "bfloat16");
    number(out, static_cast<uint64_t>(index));
    if (index == 0) {
      add(out, "B");
      for (int byte = 0; byte < 4; byte++) out.push_back(static_cast<uint8_t>(handle_bytes >> (8 * byte)));
      out.insert(out.end(), handle_bytes, 7);
      add(out, "\x94");
    } else {
      add(out, {"h\0", 2});
    }
    number(out, 1000);
    number(out, 0);
    add(out, "\x89");
    bytes(out, "/counter");
    number(out, static_cast<uint64_t>(index));
    bytes(out, std::string(64, 1));
    add(out, "\x88tR\x86");
  }
  add(out, "e.");
  return out;
}

void a_value_of_many_tensors_is_stored_once() {
  const auto few = read({pickle_of_one_handle(100, 10)});
  CHECK(few && few->segment_list.size() == 10 && few->segment_list[9].handle == std::string(100, 7));
  CHECK(!read({pickle_of_one_handle(1'000'000, 300)}));
}

}  // namespace

int main() {
  a_list_is_read_whole();
  lists_of_another_form_are_declined();
  a_pickle_that_is_cut_off_is_refused();
  a_list_with_any_byte_changed_is_read_safely();
  for (uint64_t seed = 0; seed < 5000; seed++) pieces_of_lists_do_no_harm(seed);
  a_value_of_many_tensors_is_stored_once();
  return refit::test::finish("handle_list_test");
}
