#include "core/checksum.h"

#include <cstring>
#include <vector>

#include "core/store.h"
#include "test/check.h"

using namespace refit;

namespace {

// The definition in docs/checksum.md, step by step.
uint64_t reference(uint64_t index, uint64_t bits) {
  uint64_t z = (index / 8 + 1) * 0x9E3779B97F4A7C15u;
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  z ^= z >> 31;
  z |= 1;
  for (uint64_t j = 0; j < index % 8; j++) z *= 0xD1342543DE82EF95u;
  return z * bits;
}

// Data with any bit pattern.
uint64_t noise(uint64_t index) { return splitmix64_mix((index + 1) * kGolden); }

uint64_t bits_at(const Store& store, int rank, int param, int64_t index) {
  if (store.shape(param).dtype == DType::kFloat32) return static_cast<const uint32_t*>(store.param(rank, param))[index];
  return static_cast<const uint16_t*>(store.param(rank, param))[index];
}

void a_rectangle_sums_its_elements(DType dtype) {
  CoreConfig c;
  c.ranks = 2;
  c.params = {{"a", 37, 91}, {"b", 3000, 1}, {"c", 1, 600000}};
  for (Param& param : c.params) param.dtype = dtype;
  Store store(c);
  Pool pool(2);
  store.scramble(3, pool);
  // Column slice, whole, vector, rows past others, empty ones, one row longer than a task, an index past 2^32.
  const std::vector<Rect> rects = {{0, 1, 0, 5, 7, 20, 60, 10, 31},
                                   {1, 0, 0, 0, 0, 37, 91, 0, 0},
                                   {2, 1, 1, 9, 0, 2900, 1, 50, 0},
                                   {0, 0, 0, 0, 0, 0, 5, 0, 0},
                                   {0, 0, 0, 0, 0, 5, 0, 0, 0},
                                   {3, 0, 2, 0, 1, 1, 599999, 0, 0},
                                   {0, 0, 0, int64_t{1} << 40, 3, 2, 2, 1, 1}};
  const std::vector<int64_t> cols = {100, 91, 1, 600001};
  const std::vector<uint64_t> sums = store.checksum(rects, cols, pool);
  CHECK(sums.size() == rects.size());
  for (size_t i = 0; i < rects.size(); i++) {
    const Rect& rect = rects[i];
    uint64_t expected = 0;
    for (int64_t r = 0; r < rect.rows; r++) {
      for (int64_t k = 0; k < rect.cols; k++) {
        const auto index = static_cast<uint64_t>(rect.src_row + r) * static_cast<uint64_t>(cols[rect.tensor]) +
                           static_cast<uint64_t>(rect.src_col + k);
        const int64_t at = (rect.dst_row + r) * c.params[rect.param].cols + rect.dst_col + k;
        expected += reference(index, bits_at(store, rect.rank, rect.param, at));
      }
    }
    CHECKF(sums[i] == expected, "rect %zu", i);
  }
}

// A task takes whole rows, and the last one of a rectangle takes fewer than the others.
void rectangles_of_many_rows_are_summed_to_their_last_row() {
  CoreConfig c;
  c.params = {{"whole", 1100, 301}, {"slice", 3000, 512}, {"vector", 700001, 1}};
  Store store(c);
  Pool pool(2);
  store.scramble(5, pool);
  const std::vector<Rect> rects = {
      {0, 0, 0, 0, 0, 1100, 301, 0, 0}, {1, 0, 1, 3, 7, 2999, 300, 1, 5}, {2, 0, 2, 0, 0, 700001, 1, 0, 0}};
  const std::vector<int64_t> cols = {301, 400, 1};
  const std::vector<uint64_t> sums = store.checksum(rects, cols, pool);
  for (size_t i = 0; i < rects.size(); i++) {
    const Rect& rect = rects[i];
    uint64_t expected = 0;
    for (int64_t r = 0; r < rect.rows; r++) {
      for (int64_t k = 0; k < rect.cols; k++) {
        const auto index = static_cast<uint64_t>((rect.src_row + r) * cols[rect.tensor] + rect.src_col + k);
        const int64_t at = (rect.dst_row + r) * c.params[rect.param].cols + rect.dst_col + k;
        expected += reference(index, bits_at(store, 0, rect.param, at));
      }
    }
    CHECKF(sums[i] == expected, "rect %zu", i);
  }
}

void every_length_and_start_agree_with_the_definition() {
  std::vector<uint32_t> data(300);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint32_t>(noise(i));
  for (int64_t n = 0; n <= 140; n++) {
    for (int64_t from = 0; from < 18; from++) {
      uint64_t wide = 0, narrow = 0;
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(data.data());
      for (int64_t i = 0; i < n; i++) {
        wide += reference(static_cast<uint64_t>(1000 + i), data[from + i]);
        narrow += reference(static_cast<uint64_t>(1000 + i), halves[from + i]);
      }
      CHECK(checksum_run(data.data() + from, DType::kFloat32, 1000, n) == wide);
      CHECK(checksum_run(halves + from, DType::kBFloat16, 1000, n) == narrow);
    }
  }
}

// The purpose of the checksum: it shows a change of any element and an exchange of any two.
void one_bit_or_two_exchanged_elements_change_it() {
  std::vector<uint16_t> data(512);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint16_t>(noise(i));
  const uint64_t sum = checksum_run(data.data(), DType::kBFloat16, 0, 512);
  for (size_t i = 0; i < data.size(); i++) {
    for (int bit = 0; bit < 16; bit++) {
      data[i] ^= static_cast<uint16_t>(1 << bit);
      CHECK(checksum_run(data.data(), DType::kBFloat16, 0, 512) != sum);
      data[i] ^= static_cast<uint16_t>(1 << bit);
    }
    // The other elements of the group, which share a factor, and one element far away.
    for (size_t other = i + 1; other < i + 10; other++) {
      const size_t o = (other < i + 9 ? other : i * 7 + 1) % data.size();
      if (data[i] == data[o]) continue;
      std::swap(data[i], data[o]);
      CHECK(checksum_run(data.data(), DType::kBFloat16, 0, 512) != sum);
      std::swap(data[i], data[o]);
    }
  }
}

// Real faults make small changes of adjacent elements. None of the changes here may cancel out.
void small_changes_of_one_group_never_cancel() {
  uint64_t weights[8];
  for (int j = 0; j < 8; j++) weights[j] = checksum_weight(j);
  int deltas[8];
  for (uint64_t i = 0; i < 1 << 20; i++) {
    uint64_t sum = 0;
    bool any = false;
    for (int j = 0; j < 8; j++) {
      // Alternately tiny values, powers of two, and any value.
      const uint64_t z = noise(i * 8 + static_cast<uint64_t>(j));
      const int size = i % 3 == 0   ? static_cast<int>(z % 5) - 2
                       : i % 3 == 1 ? (1 << (z % 16)) * (static_cast<int>((z >> 8) % 3) - 1)
                                    : static_cast<int>(z % 131071) - 65535;
      deltas[j] = (z >> 32) % 3 == 0 ? 0 : size;
      any = any || deltas[j] != 0;
      sum += static_cast<uint64_t>(static_cast<int64_t>(deltas[j])) * weights[j];
    }
    CHECK(!any || sum != 0);
  }
}

}  // namespace

int main() {
  // The first outputs of splitmix64 with seed 0 (Vigna's splitmix64.c): the finaliser of 1, 2, 3 times the golden
  // gamma.
  CHECK(splitmix64_mix(kGolden) == 0xE220A8397B1DCDAFu);
  CHECK(splitmix64_mix(2 * kGolden) == 0x6E789E6AA1B965F4u);
  CHECK(splitmix64_mix(3 * kGolden) == 0x06C45D188009454Fu);
  a_rectangle_sums_its_elements(DType::kBFloat16);
  a_rectangle_sums_its_elements(DType::kFloat32);
  rectangles_of_many_rows_are_summed_to_their_last_row();
  every_length_and_start_agree_with_the_definition();
  one_bit_or_two_exchanged_elements_change_it();
  small_changes_of_one_group_never_cancel();
  return refit::test::finish("checksum_test");
}
