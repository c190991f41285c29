// The places of broadcast bytes in the weights: cases by hand for each possible mistake, and random cases that are
// compared with a write, byte by byte.
#include "core/write/places.h"

#include <random>
#include <vector>

#include "test/check.h"

using namespace refit;

namespace {

using Params = std::vector<std::vector<ParamPlace>>;

constexpr uint64_t kBf16 = 2;

// Tensors in row-major order, one after another.
struct Stream {
  std::vector<Tensor> tensors;
  std::vector<Rect> rects;
  uint64_t bytes = 0;

  int add(int64_t rows, int64_t cols, DType dtype = DType::kBFloat16) {
    const uint64_t element = size_of(dtype);
    tensors.push_back({0, bytes, dtype, rows, cols, static_cast<uint64_t>(cols) * element, element});
    bytes += static_cast<uint64_t>(rows * cols) * element;
    return static_cast<int>(tensors.size()) - 1;
  }
  // Adds a rectangle: the whole tensor to rows of a parameter.
  void whole(int tensor, int param, int64_t row = 0, int rank = 0) {
    const Tensor& t = tensors[static_cast<size_t>(tensor)];
    rects.push_back({tensor, rank, param, 0, 0, t.rows, t.cols, row, 0});
  }
  // `dtype` is the dtype of all parameters.
  std::vector<uint64_t> places(const std::vector<GroupPart>& parts, Params params,
                               DType dtype = DType::kBFloat16) const {
    for (auto& rank : params) {
      for (ParamPlace& place : rank) place.dtype = dtype;
    }
    return find_places(parts, tensors, rects, params);
  }
  uint64_t place(const Params& params, DType dtype = DType::kBFloat16) const {
    return places({{0, bytes}}, params, dtype)[0];
  }
};

ParamPlace param(uint64_t offset, int64_t rows, int64_t cols, uint64_t element = kBf16) {
  const uint64_t row_bytes = static_cast<uint64_t>(cols) * element;
  return {offset, row_bytes, static_cast<uint64_t>(rows) * row_bytes};
}

// Parameters of [8, 16] and [8, 16], without a gap (256 bytes each) or with one.
Params two(uint64_t gap = 0, int ranks = 1) {
  return Params(static_cast<size_t>(ranks), {param(512, 8, 16), param(512 + 256 + gap, 8, 16)});
}

void test_whole() {
  Stream s;
  s.whole(s.add(8, 16), 0);
  s.whole(s.add(8, 16), 1);
  CHECK(s.place(two()) == 512);
  // Each part has a place, with any gap between them.
  const std::vector<GroupPart> apart{{0, 256}, {256, 256}};
  CHECK((s.places(apart, two(64)) == std::vector<uint64_t>{512, 512 + 256 + 64}));
  CHECK(s.place(two(64)) == kNoPlace);  // a gap in the weights
  // A gap in the stream, in front of it and behind it.
  CHECK((s.places({{0, 513}, {256, 512}}, two()) == std::vector<uint64_t>{kNoPlace, kNoPlace}));
  // A border inside a tensor.
  CHECK((s.places({{0, 100}, {100, 412}, {511, 1}}, two()) == std::vector<uint64_t>{512, 612, 1023}));
  // Empty parts.
  CHECK((s.places({{0, 0}, {512, 0}, {9999, 0}}, two()) == std::vector<uint64_t>{0, 0, 0}));
  CHECK(s.places({}, two()).empty());
  // The second parameter is before the first.
  const Params turned{{param(768, 8, 16), param(512, 8, 16)}};
  CHECK(s.place(turned) == kNoPlace);
  CHECK((s.places(apart, turned) == std::vector<uint64_t>{768, 512}));
  // The parameters overlap by one byte, and completely.
  CHECK(s.place({{param(512, 8, 16), param(767, 8, 16)}}) == kNoPlace);
  CHECK(s.place({{param(512, 8, 16), param(512, 8, 16)}}) == kNoPlace);
}

void test_fused() {
  // q, k and v in the rows of one parameter, then a vector.
  const Params params{{param(0, 8, 16), param(256, 16, 1)}};
  Stream s;
  s.whole(s.add(4, 16), 0, 0);
  s.whole(s.add(2, 16), 0, 4);
  s.whole(s.add(2, 16), 0, 6);
  s.whole(s.add(16, 1), 1);
  CHECK(s.place(params) == 0);
  CHECK((s.places({{128, 64}}, params) == std::vector<uint64_t>{128}));
  // One row too far, and then k and v exchanged.
  Stream off;
  off.whole(off.add(4, 16), 0, 0);
  off.whole(off.add(2, 16), 0, 5);
  CHECK(off.place(params) == kNoPlace);
  Stream turned;
  turned.whole(turned.add(2, 16), 0, 6);
  turned.whole(turned.add(2, 16), 0, 4);
  CHECK(turned.place(params) == kNoPlace);
  // Two rectangles of one tensor, in any order.
  Stream split;
  const int tensor = split.add(8, 16);
  split.rects = {{tensor, 0, 0, 5, 0, 3, 16, 5, 0}, {tensor, 0, 0, 0, 0, 5, 16, 0, 0}};
  CHECK(split.place(params) == 0);
  split.rects[0].rows = 2;  // no rectangle needs the last row
  CHECK(split.place(params) == kNoPlace);
  split.rects[0].rows = 3;
  split.rects.push_back({tensor, 0, 1, 0, 0, 1, 1, 0, 0});  // an element is needed twice
  CHECK(split.place(params) == kNoPlace);
  // Rows that are needed twice, in adjacent rows of the weights.
  split.rects = {{tensor, 0, 0, 0, 0, 5, 16, 0, 0}, {tensor, 0, 0, 3, 0, 5, 16, 5, 0}};
  CHECK(split.place({{param(0, 10, 16)}}) == kNoPlace);
}

void test_strided() {
  const Params params = two();
  // Columns of a tensor that is twice as wide, as tensor parallelism cuts it.
  Stream slice;
  const int wide = slice.add(8, 32);
  slice.rects = {{wide, 0, 0, 0, 16, 8, 16, 0, 0}};
  CHECK(slice.place(params) == kNoPlace);
  CHECK((slice.places({{32, 32}}, params) == std::vector<uint64_t>{kNoPlace}));  // even a single row of it
  slice.rects = {{wide, 0, 0, 2, 16, 1, 16, 3, 0}};
  CHECK((slice.places({{2 * 64 + 32, 32}}, params) == std::vector<uint64_t>{512 + 3 * 32}));
  // Columns of a parameter that is twice as wide.
  Stream narrow;
  const int tensor = narrow.add(8, 8);
  narrow.rects = {{tensor, 0, 0, 0, 0, 8, 8, 0, 8}};
  CHECK(narrow.place(params) == kNoPlace);
  narrow.rects = {{tensor, 0, 0, 0, 0, 1, 8, 1, 8}};
  CHECK((narrow.places({{0, 16}}, params) == std::vector<uint64_t>{512 + 32 + 16}));
  // A transposed view, a stepped one, and rows with gaps. Views of one row or column are in order.
  for (const auto& [row_bytes, col_bytes] : {std::pair<uint64_t, uint64_t>{2, 16}, {64, 4}, {48, 2}}) {
    Stream view;
    view.whole(view.add(8, 16), 0);
    view.tensors[0].row_bytes = row_bytes, view.tensors[0].col_bytes = col_bytes;
    CHECK(view.place(params) == kNoPlace);
  }
  Stream row;
  row.whole(row.add(1, 16), 0, 2);
  row.tensors[0].row_bytes = 999;
  CHECK(row.place(params) == 512 + 64);
  // Another dtype, with another size and with the same size, and float32 without a conversion.
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    Stream other;
    other.whole(other.add(8, 16, dtype), 0);
    CHECK(other.place(params) == kNoPlace);
  }
  Stream plain;
  plain.whole(plain.add(8, 16, DType::kFloat32), 0);
  CHECK(plain.place({{param(64, 8, 16, 4)}}, DType::kFloat32) == 64);
  Stream mixed;
  mixed.whole(mixed.add(8, 16), 0);
  mixed.whole(mixed.add(8, 16, DType::kFloat32), 1);
  CHECK((mixed.places({{0, 256}, {256, 512}}, params) == std::vector<uint64_t>{512, kNoPlace}));
}

void test_ranks() {
  // The same place on both ranks, and then a rank with another place, with less or with nothing.
  const auto on = [](const std::vector<int>& ranks) {
    Stream s;
    const int tensor = s.add(8, 16);
    for (const int rank : ranks) s.whole(tensor, 0, 0, rank);
    return s;
  };
  CHECK(on({0, 1}).place(two(0, 2)) == 512);
  CHECK(on({0}).place(two(0, 2)) == kNoPlace);
  CHECK(on({1}).place(two(0, 2)) == kNoPlace);
  Params elsewhere = two(0, 2);
  elsewhere[1][0].offset = 1024;
  CHECK(on({0, 1}).place(elsewhere) == kNoPlace);
  Stream half = on({0, 1});
  half.rects[1].rows = 7;
  CHECK(half.place(two(0, 2)) == kNoPlace);
  Stream shards;
  const int tensor = shards.add(16, 16);
  shards.rects = {{tensor, 0, 0, 0, 0, 8, 16, 0, 0}, {tensor, 1, 0, 8, 0, 8, 16, 0, 0}};
  CHECK(shards.place(two(0, 2)) == kNoPlace);
}

void test_empty() {
  // Tensors without elements change nothing.
  Stream s;
  s.whole(s.add(8, 16), 0);
  s.whole(s.add(0, 16), 0);
  s.whole(s.add(4, 0), 1);
  s.whole(s.add(8, 16), 1);
  CHECK(s.place(two()) == 512);
  Stream none;
  CHECK((none.places({{0, 2}}, two()) == std::vector<uint64_t>{kNoPlace}));
}

void test_are_weights() {
  const std::vector<ParamPlace> params{param(0, 8, 16), param(256, 1, 0), param(256, 8, 16), param(576, 8, 16)};
  for (const auto& [offset, bytes] :
       {std::pair<uint64_t, uint64_t>{0, 512}, {0, 0}, {255, 2}, {256, 256}, {511, 1}, {576, 256}, {9999, 0}}) {
    CHECKF(are_weights(params, offset, bytes), "%llu + %llu", static_cast<unsigned long long>(offset),
           static_cast<unsigned long long>(bytes));
  }
  for (const auto& [offset, bytes] :
       {std::pair<uint64_t, uint64_t>{0, 513}, {511, 2}, {512, 1}, {575, 2}, {576, 257}, {832, 1}, {UINT64_MAX, 2}}) {
    CHECKF(!are_weights(params, offset, bytes), "%llu + %llu", static_cast<unsigned long long>(offset),
           static_cast<unsigned long long>(bytes));
  }
  CHECK(!are_weights(params, 513, 1));
  CHECK(!are_weights({}, 0, 1));
  CHECK(!are_weights({param(0, 8, 16), param(257, 8, 16)}, 0, 300));
  CHECK(!are_weights({param(8, 8, 16)}, 7, 2));
}

// Finds the place of a part by following every byte of the stream to its place in a write.
uint64_t followed(const Stream& s, const GroupPart& part, const Params& params, DType dtype) {
  uint64_t place = kNoPlace;
  for (size_t rank = 0; rank < params.size(); rank++) {
    std::vector<uint64_t> to(s.bytes, kNoPlace);
    std::vector<int> needed(s.bytes);
    for (const Rect& rect : s.rects) {
      if (static_cast<size_t>(rect.rank) != rank) continue;
      const Tensor& tensor = s.tensors[static_cast<size_t>(rect.tensor)];
      const uint64_t element = size_of(tensor.dtype);
      for (int64_t r = 0; r < rect.rows; r++) {
        for (int64_t c = 0; c < rect.cols; c++) {
          const ParamPlace& p = params[rank][static_cast<size_t>(rect.param)];
          const uint64_t from = tensor.at(rect.src_row + r, rect.src_col + c);
          for (uint64_t b = 0; b < element; b++) {
            needed[from + b]++;
            to[from + b] = tensor.dtype != dtype ? kNoPlace
                                                 : p.offset + static_cast<uint64_t>(rect.dst_row + r) * p.row_bytes +
                                                       static_cast<uint64_t>(rect.dst_col + c) * element + b;
          }
        }
      }
    }
    for (uint64_t i = 0; i < part.bytes; i++) {
      const uint64_t at = part.offset + i;
      if (at >= s.bytes || needed[at] != 1 || to[at] == kNoPlace) return kNoPlace;
      if (place == kNoPlace) place = to[at] - i;
      if (to[at] != place + i) return kNoPlace;
    }
  }
  return part.bytes == 0 ? 0 : place;
}

// True if a part has bytes of a rectangle whose rows are not adjacent: find_places has no place for its single rows.
bool in_columns(const Stream& s, const GroupPart& part) {
  for (const Rect& rect : s.rects) {
    const Tensor& tensor = s.tensors[static_cast<size_t>(rect.tensor)];
    if (rect.rows < 2 || rect.cols == 0 || rect.cols == tensor.cols) continue;
    const uint64_t end = tensor.at(rect.src_row + rect.rows, 0);
    if (tensor.at(rect.src_row, 0) < part.offset + part.bytes && part.offset < end) return true;
  }
  return false;
}

void test_random(unsigned seed) {
  std::mt19937 rng(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
  size_t found = 0, several = 0;
  for (int round = 0; round < 4000; round++) {
    const int ranks = below(4) == 0 ? 2 : 1;
    const int64_t cols = 1 + below(3);
    Params params(static_cast<size_t>(ranks));
    std::vector<int64_t> rows;
    Stream s;
    uint64_t offset = 0;
    for (int p = 0; p < 3; p++) {
      rows.push_back(1 + below(4));
      for (auto& rank : params) rank.push_back(param(offset, rows.back(), cols));
      offset += static_cast<uint64_t>(rows.back() * cols) * kBf16 + (below(4) == 0 ? 2 : 0);
    }
    // Parameters in order, each in one tensor or two, sometimes with a mistake.
    for (int p = 0; p < 3; p++) {
      const int64_t cut = below(rows[static_cast<size_t>(p)] + 1);
      for (const auto& [from, count] :
           {std::pair<int64_t, int64_t>{0, cut}, {cut, rows[static_cast<size_t>(p)] - cut}}) {
        const int tensor = s.add(count, cols,
                                 below(20) == 0   ? DType::kFloat16
                                 : below(20) == 0 ? DType::kFloat32
                                                  : DType::kBFloat16);
        for (int rank = 0; rank < ranks; rank++) {
          if (below(20) == 0) continue;
          Rect rect{tensor, rank, below(20) == 0 ? static_cast<int>(below(3)) : p, 0, 0, count, cols, from, 0};
          if (rect.rows > 0 && below(12) == 0) rect.rows--;
          if (rect.cols > 1 && below(12) == 0) rect.cols--;
          if (below(20) == 0) rect.dst_row = 0;
          if (rect.rows > 1 && below(20) == 0) rect.src_row++, rect.rows--;
          s.rects.push_back(rect);
          if (below(30) == 0) s.rects.push_back(rect);
        }
        if (below(8) == 0) s.bytes += 2;
      }
    }
    std::vector<GroupPart> parts;
    for (int i = 0; i < 8; i++) {
      const auto begin = static_cast<uint64_t>(below(static_cast<int64_t>(s.bytes)));
      parts.push_back({begin, static_cast<uint64_t>(below(static_cast<int64_t>(s.bytes - begin) + 2))});
    }
    parts.push_back({0, s.bytes});
    const std::vector<uint64_t> places = s.places(parts, params);
    for (size_t i = 0; i < parts.size(); i++) {
      const uint64_t expected = followed(s, parts[i], params, DType::kBFloat16);
      CHECKF(places[i] == expected || (places[i] == kNoPlace && in_columns(s, parts[i])),
             "round %d, part %zu (%llu + %llu): %lld, expected %lld", round, i,
             static_cast<unsigned long long>(parts[i].offset), static_cast<unsigned long long>(parts[i].bytes),
             static_cast<long long>(places[i]), static_cast<long long>(expected));
      if (expected != kNoPlace && parts[i].bytes > 0) found++;
      if (expected != kNoPlace && i + 1 == parts.size() && ranks > 1) several++;
    }
  }
  CHECKF(found > 2000 && several > 5, "%zu places, %zu of whole streams on two ranks", found, several);
}

}  // namespace

int main() {
  test_whole();
  test_fused();
  test_strided();
  test_ranks();
  test_empty();
  test_are_weights();
  for (const unsigned seed : {1u, 2u, 3u}) test_random(seed);
  return refit::test::finish("places_test");
}
