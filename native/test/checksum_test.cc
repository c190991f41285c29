#include "core/checksum.h"

#include <cstring>
#include <vector>

#include "core/store.h"
#include "test/check.h"

using namespace refit;

namespace {

// docs/checksum.md, word by word.
uint64_t reference(uint64_t index, uint64_t bits) {
  uint64_t z = ((index + 1) * 0x9E3779B97F4A7C15u) ^ bits;
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  z ^= z >> 31;
  return z;
}

uint64_t bits_at(const Store& store, int rank, int param, int64_t index) {
  if (store.dtype() == DType::kFloat32) return static_cast<const uint32_t*>(store.param(rank, param))[index];
  return static_cast<const uint16_t*>(store.param(rank, param))[index];
}

void a_rectangle_sums_its_elements(DType dtype) {
  CoreConfig c;
  c.dtype = dtype;
  c.ranks = 2;
  c.params = {{"a", 37, 91}, {"b", 3000, 1}, {"c", 1, 600000}};
  Store store(c);
  Pool pool(2);
  store.scramble(3, pool);
  // Columns slice, whole, vector, rows past others, empty ones, a single row longer than one task, an index past 2^32.
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

void every_length_and_start_agree_with_the_definition() {
  std::vector<uint32_t> data(300);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint32_t>(reference(i, 5));
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

// What the checksum is for: any element changed, or any two exchanged, shows.
void one_bit_or_two_exchanged_elements_change_it() {
  std::vector<uint16_t> data(512);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint16_t>(reference(i, 9));
  const uint64_t sum = checksum_run(data.data(), DType::kBFloat16, 0, 512);
  for (size_t i = 0; i < data.size(); i++) {
    for (int bit = 0; bit < 16; bit++) {
      data[i] ^= static_cast<uint16_t>(1 << bit);
      CHECK(checksum_run(data.data(), DType::kBFloat16, 0, 512) != sum);
      data[i] ^= static_cast<uint16_t>(1 << bit);
    }
    const size_t other = (i * 7 + 1) % data.size();
    if (data[i] == data[other]) continue;
    std::swap(data[i], data[other]);
    CHECK(checksum_run(data.data(), DType::kBFloat16, 0, 512) != sum);
    std::swap(data[i], data[other]);
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
  every_length_and_start_agree_with_the_definition();
  one_bit_or_two_exchanged_elements_change_it();
  return refit::test::finish("checksum_test");
}
