#include "core/store.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/arena.h"
#include "core/fault.h"
#include "core/write/write_check.h"
#include "test/check.h"

using namespace refit;

namespace {

CoreConfig config(DType dtype, int ranks, std::vector<Param> params) {
  CoreConfig c;
  c.ranks = ranks;
  c.params = std::move(params);
  for (Param& param : c.params) param.dtype = dtype;
  return c;
}

void parameters_are_zero_aligned_disjoint_and_fixed() {
  Store store(config(DType::kBFloat16, 3, {{"a", 3, 5}, {"b", 1, 1}, {"empty", 0, 7}, {"c", 1000, 33}}));
  std::set<std::pair<uintptr_t, uintptr_t>> spans;
  uint64_t sum = 0;
  for (int rank = 0; rank < 3; rank++) {
    for (int p = 0; p < 4; p++) {
      const auto at = reinterpret_cast<uintptr_t>(store.param(rank, p));
      const size_t bytes = static_cast<size_t>(store.shape(p).rows * store.shape(p).cols) * 2;
      CHECK(at % 64 == 0);
      CHECK(at == reinterpret_cast<uintptr_t>(store.param(rank, p)));
      bool zero = true;
      for (size_t i = 0; i < bytes; i++) zero = zero && reinterpret_cast<const uint8_t*>(at)[i] == 0;
      CHECK(zero);
      if (bytes > 0) spans.insert({at, at + bytes});
      sum += Arena::padded(bytes);
    }
  }
  CHECK(spans.size() == 9);
  uintptr_t end = 0;
  for (const auto& [from, to] : spans) {
    CHECK(from >= end);
    end = to;
  }
  CHECK(store.bytes() == sum);
}

void impossible_shapes_are_refused() {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  CHECK_THROWS(Store(config(DType::kFloat32, 1, {{"a", -1, 4}})), std::invalid_argument);
  CHECK_THROWS(Store(config(DType::kFloat32, 1, {{"a", huge, huge}})), std::invalid_argument);
  CHECK_THROWS(Store(config(DType::kFloat32, 1, {{"a", huge / 2, 1}})), std::invalid_argument);
  CHECK_THROWS(Store(config(DType::kFloat32, 1, {{"a", int64_t{1} << 58, 1}})), std::bad_alloc);
#ifdef REFIT_FAULTS
  fault::arm(fault::Point::kAlloc, 2, fault::Action::kFail, 0);
  CHECK_THROWS(Store(config(DType::kFloat32, 2, {{"a", 4, 4}})), std::bad_alloc);
  fault::disarm();
#endif
}

void an_arena_refuses_more_than_it_has() {
  Arena arena(256);
  void* a = arena.carve(1);
  void* b = arena.carve(65);
  CHECK(static_cast<uint8_t*>(b) - static_cast<uint8_t*>(a) == 64);
  CHECK(arena.used() == 192 && arena.bytes() == 256);
  CHECK_THROWS(arena.carve(65), std::bad_alloc);
  CHECK_THROWS(arena.carve(std::numeric_limits<size_t>::max()), std::bad_alloc);
  arena.carve(64);
  CHECK_THROWS(arena.carve(1), std::bad_alloc);
  Arena other = std::move(arena);
  CHECK(arena.data() == nullptr && arena.bytes() == 0 && other.data() == a);
}

void a_read_gives_the_rectangle_row_by_row() {
  Store store(config(DType::kFloat32, 2, {{"a", 7, 11}}));
  float* data = static_cast<float*>(store.param(1, 0));
  for (int i = 0; i < 77; i++) data[i] = static_cast<float>(i);
  for (int row = 0; row <= 7; row++) {
    for (int col = 0; col <= 11; col++) {
      const int rows = 7 - row, cols = 11 - col;
      std::vector<float> out(static_cast<size_t>(rows * cols) + 1, -1);
      store.read(1, 0, row, col, rows, cols, reinterpret_cast<uint8_t*>(out.data()));
      bool same = out.back() == -1;
      for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) same = same && out[r * cols + c] == static_cast<float>((row + r) * 11 + col + c);
      }
      CHECKF(same, "row=%d col=%d", row, col);
    }
  }
}

void scramble_fills_every_element_with_finite_noise_of_its_own() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    const CoreConfig c = config(dtype, 2, {{"a", 700, 501}, {"b", 700, 501}, {"c", 3, 1}});
    Store one(c), two(c);
    Pool pool(2), serial(1);
    one.scramble(7, pool);
    two.scramble(7, serial);
    std::set<std::vector<float>> heads;
    for (int rank = 0; rank < 2; rank++) {
      for (int p = 0; p < 3; p++) {
        const int64_t n = c.params[p].rows * c.params[p].cols;
        CHECK(std::memcmp(one.param(rank, p), two.param(rank, p), static_cast<size_t>(n) * size_of(dtype)) == 0);
        std::vector<float> head;
        double sum = 0, squares = 0;
        int64_t zero = 0;
        bool bounded = true;
        for (int64_t i = 0; i < n; i++) {
          const float v = dtype == DType::kFloat32
                              ? static_cast<const float*>(one.param(rank, p))[i]
                              : to_float(dtype, static_cast<const uint16_t*>(one.param(rank, p))[i]);
          bounded = bounded && std::isfinite(v) && std::fabs(v) <= 1;
          zero += v == 0;
          sum += v;
          squares += static_cast<double>(v) * v;
          if (i < 3) head.push_back(v);
        }
        CHECK(bounded);
        heads.insert(head);
        if (n > 1000) {
          CHECKF(zero < 5 && std::fabs(sum / n) < 0.01 && std::fabs(squares / n - 1.0 / 3) < 0.01, "zero=%ld mean=%g",
                 static_cast<long>(zero), sum / n);
        }
      }
    }
    CHECK(heads.size() == 6);
    two.scramble(8, pool);
    CHECK(std::memcmp(one.param(0, 0), two.param(0, 0), 64) != 0);
  }
}

void a_job_out_of_bounds_is_refused() {
  const std::vector<Param> params = {{"a", 8, 16}, {"b", 4, 4}};
  const std::vector<uint8_t> memory(8 * 16 * 4);
  const auto job = [&](Tensor tensor, std::vector<Rect> rects) {
    WriteJob j;
    j.sources = {{-1, memory.data(), memory.size()}};
    j.tensors = {tensor};
    j.rects = std::move(rects);
    return j;
  };
  const Tensor ok{0, 0, DType::kFloat32, 8, 16, 64, 4};
  const Rect whole{0, 0, 0, 0, 0, 8, 16, 0, 0};
  check_write(job(ok, {whole}), 1, params);
  const int64_t huge = std::numeric_limits<int64_t>::max();
  // Tensors.
  for (const Tensor& bad : std::vector<Tensor>{{1, 0, DType::kFloat32, 8, 16, 64, 4},
                                               {-1, 0, DType::kFloat32, 8, 16, 64, 4},
                                               {0, 1, DType::kFloat32, 8, 16, 64, 4},
                                               {0, ~uint64_t{0}, DType::kFloat32, 8, 16, 64, 4},
                                               {0, 0, DType::kFloat32, 8, 16, 63, 4},
                                               {0, 0, DType::kFloat32, 9, 16, 64, 4},
                                               {0, 0, DType::kFloat32, huge, 16, 64, 4},
                                               {0, 0, DType::kFloat32, huge, huge, ~uint64_t{0}, 4},
                                               {0, 0, DType::kFloat32, -1, 16, 64, 4},
                                               {0, 0, DType::kFloat32, 8, 16, 64, 5},
                                               {0, 0, DType::kFloat32, 8, 16, 64, ~uint64_t{0}}}) {
    CHECK_THROWS(check_write(job(bad, {}), 1, params), std::invalid_argument);
  }
  // The last row may end with the source, with any pitch.
  check_write(job({0, 0, DType::kFloat32, 2, 16, 448, 4}, {}), 1, params);
  CHECK_THROWS(check_write(job({0, 0, DType::kFloat32, 2, 16, 449, 4}, {}), 1, params), std::invalid_argument);
  // Rectangles: every field once too small and once too large.
  for (const Rect& bad : std::vector<Rect>{
           {1, 0, 0, 0, 0, 8, 16, 0, 0},  {-1, 0, 0, 0, 0, 8, 16, 0, 0},      {0, 1, 0, 0, 0, 8, 16, 0, 0},
           {0, -1, 0, 0, 0, 8, 16, 0, 0}, {0, 0, 2, 0, 0, 8, 16, 0, 0},       {0, 0, -1, 0, 0, 8, 16, 0, 0},
           {0, 0, 1, 0, 0, 8, 16, 0, 0},  {0, 0, 0, 1, 0, 8, 16, 0, 0},       {0, 0, 0, -1, 0, 8, 16, 0, 0},
           {0, 0, 0, 0, 1, 8, 16, 0, 0},  {0, 0, 0, 0, -1, 8, 16, 0, 0},      {0, 0, 0, 0, 0, 9, 16, 0, 0},
           {0, 0, 0, 0, 0, -1, 16, 0, 0}, {0, 0, 0, 0, 0, 8, 17, 0, 0},       {0, 0, 0, 0, 0, 8, -1, 0, 0},
           {0, 0, 0, 0, 0, 8, 16, 1, 0},  {0, 0, 0, 0, 0, 8, 16, -1, 0},      {0, 0, 0, 0, 0, 8, 16, 0, 1},
           {0, 0, 0, 0, 0, 8, 16, 0, -1}, {0, 0, 0, huge, 0, huge, 16, 0, 0}, {0, 0, 0, 0, 0, 8, 16, huge, 0}}) {
    CHECK_THROWS(check_write(job(ok, {bad}), 1, params), std::invalid_argument);
  }
}

void overlapping_and_unsorted_rectangles_are_refused() {
  const std::vector<Param> params = {{"a", 8, 16}};
  const std::vector<uint8_t> memory(8 * 16 * 4);
  WriteJob job;
  job.sources = {{-1, memory.data(), memory.size()}};
  job.tensors = {{0, 0, DType::kFloat32, 8, 16, 64}, {0, 0, DType::kFloat32, 8, 16, 64}};
  const Rect left{0, 0, 0, 0, 0, 8, 8, 0, 0}, right{1, 0, 0, 0, 0, 8, 8, 0, 8};
  job.rects = {left, right};
  check_write(job, 2, params);
  job.rects = {right, left};
  CHECK_THROWS(check_write(job, 2, params), std::invalid_argument);
  // Against a brute-force result.
  uint64_t state = 1;
  const auto random = [&](int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(n));
  };
  int overlaps = 0;
  for (int round = 0; round < 4000; round++) {
    job.rects.clear();
    int taken[2][8][16] = {};
    bool overlap = false;
    for (int64_t n = random(6); n >= 0; n--) {
      Rect rect{0, static_cast<int>(random(2)), 0, 0, 0, random(5), random(6), 0, 0};
      rect.dst_row = random(static_cast<int>(9 - rect.rows));
      rect.dst_col = random(static_cast<int>(17 - rect.cols));
      for (int64_t r = 0; r < rect.rows; r++) {
        for (int64_t c = 0; c < rect.cols; c++) overlap |= taken[rect.rank][rect.dst_row + r][rect.dst_col + c]++ > 0;
      }
      job.rects.push_back(rect);
    }
    overlaps += overlap;
    bool refused = false;
    try {
      check_write(job, 2, params);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECKF(refused == overlap, "round %d", round);
  }
  CHECK(overlaps > 500 && overlaps < 3500);
}

}  // namespace

int main() {
  parameters_are_zero_aligned_disjoint_and_fixed();
  impossible_shapes_are_refused();
  an_arena_refuses_more_than_it_has();
  a_read_gives_the_rectangle_row_by_row();
  scramble_fills_every_element_with_finite_noise_of_its_own();
  a_job_out_of_bounds_is_refused();
  overlapping_and_unsorted_rectangles_are_refused();
  return refit::test::finish("store_test");
}
