// Every test writes position-coded data and compares whole parameters with a plain loop over the rectangles.
#include "core/write/write.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/fault.h"
#include "core/store.h"
#include "core/write/write_check.h"
#include "core/write/write_convert.h"
#include "core/write/write_plan.h"
#include "test/check.h"
#include "test/random.h"
#include "test/write_fixture.h"

using namespace refit;
using test::Random;

namespace {

void every_dtype_layout_and_offset_is_written_exactly() {
  for (const DType to : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const DType from : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const int ranks : {1, 2, 4}) {
        for (const uint64_t gap : {0, 1, 3}) {
          for (const int threads : {1, 3}) {
            const auto f = model_like(to, from, ranks, 5, gap);
            Store store(f->config);
            Pool pool(threads);
            f->in_memory();
            check_all(*f, store, pool, "memory");
            f->in_files();
            check_all(*f, store, pool, "file");
          }
        }
      }
    }
  }
}

void large_tensors_are_cut_into_chunks_and_read_once() {
  const auto f = model_like(DType::kBFloat16, DType::kBFloat16, 2, 100, 1);
  f->in_files();
  Store store(f->config);
  Pool pool(2);
  check_all(*f, store, pool, "large");
  uint64_t bytes = 0;
  for (const Tensor& t : f->job.tensors) bytes += static_cast<uint64_t>(t.rows) * t.row_bytes;
  const WriteOutcome outcome = store.write(f->job, pool);
  CHECKF(outcome.bytes == bytes, "%lu of %lu", static_cast<unsigned long>(outcome.bytes),
         static_cast<unsigned long>(bytes));
  const WritePlan plan = plan_write(f->job, f->config.params);
  int64_t straight = 0;
  for (const Chunk& chunk : plan.chunks) {
    straight += chunk.straight;
    // Row splits, replicas and vectors need no staging; column splits do.
    CHECK(chunk.straight == (chunk.tensor != 1 && chunk.tensor != 4));
  }
  CHECK(straight > 3 && plan.chunks.size() > 15 && plan.scratch <= (512 << 10));
}

void a_single_long_row_is_cut_by_columns() {
  for (const DType from : {DType::kBFloat16, DType::kFloat32}) {
    Fixture f;
    f.config.ranks = 2;
    f.config.params = {{"a", 1, 5000001}, {"b", 3, 1000}};
    const int t = f.add_tensor(from, 2, 5000011, 1, 0);
    f.job.rects = {
        {t, 0, 0, 0, 5, 1, 5000001, 0, 0}, {t, 1, 0, 1, 0, 1, 4000000, 0, 7}, {t, 1, 1, 1, 4999999, 1, 12, 2, 100}};
    f.in_files();
    Store store(f.config);
    Pool pool(2);
    check_all(f, store, pool, "long row");
    const WritePlan plan = plan_write(f.job, f.config.params);
    CHECK(plan.chunks.size() > 4 && plan.scratch <= (5 << 20));
    if (from == DType::kBFloat16) {
      f.job.rects.resize(1);
      CHECK(store.write(f.job, pool).bytes == 5000001u * 2);
    }
  }
}

void rows_that_no_rectangle_needs_are_not_read() {
  Fixture f;
  f.config.params = {{"a", 30, 1000}};
  const int t = f.add_tensor(DType::kBFloat16, 100, 1000, 0, 0);
  f.job.rects = {
      {t, 0, 0, 90, 0, 10, 1000, 0, 0}, {t, 0, 0, 20, 0, 15, 1000, 10, 0}, {t, 0, 0, 40, 500, 5, 500, 25, 0}};
  f.in_files();
  Store store(f.config);
  Pool pool(2);
  check_all(f, store, pool, "sparse rows");
  CHECK(store.write(f.job, pool).bytes == 25 * 2000 + 4 * 2000 + 1000);
}

void random_rectangles_arrive(uint64_t seed) {
  Random random(seed);
  Fixture f;
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  f.config.ranks = static_cast<int>(1 + random.below(3));
  const int params = static_cast<int>(1 + random.below(4));
  for (int p = 0; p < params; p++) {
    const DType dtype = dtypes[random.below(3)];
    f.config.params.push_back({"p", 1 + random.below(60), 1 + random.below(90), dtype});
  }
  // Grids over the parameters; each cell comes from a random place of a random tensor.
  std::vector<std::vector<Rect>> of_tensor;
  const int tensors = static_cast<int>(1 + random.below(4));
  for (int t = 0; t < tensors; t++) {
    f.add_tensor(dtypes[random.below(3)], 1 + random.below(70), 1 + random.below(100),
                 static_cast<uint64_t>(random.below(5)), static_cast<uint64_t>(random.below(2) * random.below(7)));
    of_tensor.emplace_back();
  }
  for (int rank = 0; rank < f.config.ranks; rank++) {
    for (int p = 0; p < params; p++) {
      const int64_t grid_rows = 1 + random.below(4), grid_cols = 1 + random.below(3);
      const Param& param = f.config.params[p];
      for (int64_t i = 0; i < grid_rows; i++) {
        for (int64_t j = 0; j < grid_cols; j++) {
          if (random.below(5) == 0) continue;
          const int t = static_cast<int>(random.below(tensors));
          const Tensor& tensor = f.job.tensors[t];
          Rect rect{t, rank, p, 0, 0, 0, 0, param.rows * i / grid_rows, param.cols * j / grid_cols};
          rect.rows = std::min(tensor.rows, param.rows * (i + 1) / grid_rows - rect.dst_row);
          rect.cols = std::min(tensor.cols, param.cols * (j + 1) / grid_cols - rect.dst_col);
          rect.src_row = random.below(tensor.rows - rect.rows + 1);
          rect.src_col = random.below(tensor.cols - rect.cols + 1);
          of_tensor[t].push_back(rect);
        }
      }
    }
  }
  for (const auto& rects : of_tensor) f.job.rects.insert(f.job.rects.end(), rects.begin(), rects.end());
  Store store(f.config);
  Pool pool(static_cast<int>(1 + random.below(3)));
  f.in_memory();
  check_all(f, store, pool, "random, memory");
  f.in_files();
  check_all(f, store, pool, "random, file");
}

void the_error_for_a_short_file_names_its_end() {
  const auto f = model_like(DType::kBFloat16, DType::kBFloat16, 2, 5, 1);
  f->in_files();
  Pool pool(2);
  Store store(f->config);
  const Tensor& last = f->job.tensors[4];
  const uint64_t end = last.offset + static_cast<uint64_t>(last.rows) * last.row_bytes;
  for (const uint64_t cut : {end - 1, last.offset + 1, last.offset, f->job.tensors[2].offset + 5, uint64_t{0}}) {
    CHECK(ftruncate(f->fds[0], static_cast<off_t>(cut)) == 0);
    const WriteOutcome outcome = store.write(f->job, pool);
    CHECKF(outcome.error.find("file ended at byte ") == 0 && outcome.error.find(", expected ") != std::string::npos,
           "%s", outcome.error.c_str());
    CHECK(outcome.error_tensor >= 0 && outcome.bytes <= cut);
    if (cut + 1 == end) {
      CHECK(outcome.error == "file ended at byte " + std::to_string(cut) + ", expected " + std::to_string(end));
      CHECK(outcome.error_tensor == 4);
    }
    for (size_t t = 0; t < outcome.states.size(); t++) {
      const Tensor& tensor = f->job.tensors[t];
      const bool whole = tensor.offset + static_cast<uint64_t>(tensor.rows) * tensor.row_bytes <= cut;
      CHECK(whole || outcome.states[t] != static_cast<uint8_t>(TensorState::kWritten));
    }
  }
}

// Bytes that are read straight into a parameter are there, also if the rest does not come.
void a_file_that_ends_inside_a_parameter_leaves_it_partial() {
  const auto f = model_like(DType::kBFloat16, DType::kBFloat16, 1, 5, 0);
  f->in_files();
  Pool pool(1);
  Store store(f->config);
  for (size_t last = f->job.tensors.size(); last-- > 0;) {
    const Tensor& tensor = f->job.tensors[last];
    store.scramble(7, pool);
    const auto before = contents(store);
    CHECK(ftruncate(f->fds[0], static_cast<off_t>(tensor.offset + 6)) == 0);
    const WriteOutcome outcome = store.write(f->job, pool);
    const auto after = contents(store);
    for (size_t t = 0; t < outcome.states.size(); t++) {
      const TensorState expected = t < last    ? TensorState::kWritten
                                   : t == last ? TensorState::kPartial
                                               : TensorState::kUntouched;
      CHECKF(outcome.states[t] == static_cast<uint8_t>(expected), "cut in tensor %zu: state %d of %zu", last,
             outcome.states[t], t);
      CHECK((after[t] != before[t]) == (t <= last));
    }
  }
}

void system_errors_are_named_and_change_nothing() {
  const auto f = model_like(DType::kBFloat16, DType::kBFloat16, 1, 5, 0);
  Pool pool(2);
  Store store(f->config);
  store.scramble(1, pool);
  const auto before = contents(store);
  const int directory = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int ends[2];
  CHECK(pipe(ends) == 0);
  for (const int fd : {directory, ends[0], 1000000}) {
    f->job.sources = {{fd, nullptr, 0}};
    const WriteOutcome outcome = store.write(f->job, pool);
    CHECKF(outcome.error.find("read at byte ") == 0, "%s", outcome.error.c_str());
    for (const uint8_t state : outcome.states) CHECK(state == static_cast<uint8_t>(TensorState::kUntouched));
    CHECK(contents(store) == before && outcome.bytes == 0);
  }
  close(directory);
  close(ends[0]);
  close(ends[1]);
}

void a_cancelled_write_stops() {
  const auto f = model_like(DType::kBFloat16, DType::kBFloat16, 1, 5, 0);
  f->in_memory();
  Pool pool(2);
  Store store(f->config);
  const auto before = contents(store);
  const std::atomic<bool> cancel = true;
  f->job.cancel = &cancel;
  const WriteOutcome outcome = store.write(f->job, pool);
  CHECK(outcome.error == "the write was cancelled" && contents(store) == before);
}

void an_empty_job_and_empty_tensors_are_written() {
  Fixture f;
  f.config.params = {{"a", 4, 4}};
  Pool pool(2);
  Store store(f.config);
  CHECK(store.write(f.job, pool).error.empty());
  f.add_tensor(DType::kFloat32, 0, 4, 0, 0);
  f.add_tensor(DType::kFloat32, 4, 4, 0, 0);
  f.job.rects = {{0, 0, 0, 0, 0, 0, 4, 0, 0}, {1, 0, 0, 1, 1, 0, 3, 0, 0}};
  f.in_files();
  const WriteOutcome outcome = store.write(f.job, pool);
  CHECK(outcome.error.empty() && outcome.states == std::vector<uint8_t>({2, 2}) && outcome.bytes == 0);
}

#ifdef REFIT_FAULTS
// After a fault at any pass of a fault point, the parameters agree with the reported states.
void states_are_exact_at_every_fault(fault::Point point, int threads) {
  const auto f =
      model_like(DType::kBFloat16, point == fault::Point::kCopy ? DType::kFloat32 : DType::kBFloat16, 2, 60, 1);
  f->in_files();
  Pool pool(threads);
  Store store(f->config);
  store.scramble(5, pool);
  const auto before = contents(store);
  int fired = 0;
  for (int64_t k = 1;; k++) {
    for (int rank = 0; rank < 2; rank++) {
      for (int p = 0; p < store.params(); p++) {
        const auto& was = before[static_cast<size_t>(rank * store.params() + p)];
        std::memcpy(store.param(rank, p), was.data(), was.size());
      }
    }
    fault::arm(point, k, fault::Action::kFail, 0);
    const WriteOutcome outcome = store.write(f->job, pool);
    fault::disarm();
    const auto after = contents(store);
    std::vector<bool> written(f->job.tensors.size());
    int partial = 0;
    for (size_t t = 0; t < written.size(); t++) {
      written[t] = outcome.states[t] == static_cast<uint8_t>(TensorState::kWritten);
      partial += outcome.states[t] == static_cast<uint8_t>(TensorState::kPartial);
    }
    if (outcome.error.empty()) {
      CHECK(after == f->expected(before, std::vector<bool>(written.size(), true)));
      break;
    }
    fired++;
    CHECK(outcome.error.find("injected fault") == 0);
    CHECK(!written[static_cast<size_t>(outcome.error_tensor)]);
    // Each tensor has its own parameter here, so the parameter identifies the tensor.
    const auto whole = f->expected(before, written);
    for (size_t i = 0; i < after.size(); i++) {
      const size_t t = i % f->config.params.size();
      const bool is_partial = outcome.states[t] == static_cast<uint8_t>(TensorState::kPartial);
      if (is_partial) continue;
      CHECKF(after[i] == whole[i], "k=%ld tensor=%zu", static_cast<long>(k), t);
    }
    for (size_t t = 0; t < written.size(); t++) {
      if (outcome.states[t] != static_cast<uint8_t>(TensorState::kPartial)) continue;
      // kPartial must be exact: something has changed.
      const bool changed =
          after[t] != before[t] || after[t + f->config.params.size()] != before[t + f->config.params.size()];
      CHECKF(changed, "k=%ld tensor=%zu", static_cast<long>(k), t);
    }
    CHECK(partial <= 2 * threads);
  }
  CHECKF(fired > 10, "%d", fired);
}

void a_lack_of_memory_for_buffers_changes_nothing() {
  const auto f = model_like(DType::kBFloat16, DType::kFloat32, 2, 5, 0);
  f->in_files();
  Pool pool(2);
  Store store(f->config);
  const auto before = contents(store);
  fault::arm(fault::Point::kAlloc, 1, fault::Action::kFail, 0);
  const WriteOutcome outcome = store.write(f->job, pool);
  fault::disarm();
  CHECK(outcome.error == "no memory for read buffers" && outcome.error_tensor == -1);
  for (const uint8_t state : outcome.states) CHECK(state == 0);
  CHECK(contents(store) == before);
}
#endif

}  // namespace

int main() {
  every_dtype_layout_and_offset_is_written_exactly();
  large_tensors_are_cut_into_chunks_and_read_once();
  a_single_long_row_is_cut_by_columns();
  rows_that_no_rectangle_needs_are_not_read();
  for (uint64_t seed = 0; seed < 300; seed++) random_rectangles_arrive(seed);
  the_error_for_a_short_file_names_its_end();
  a_file_that_ends_inside_a_parameter_leaves_it_partial();
  system_errors_are_named_and_change_nothing();
  a_cancelled_write_stops();
  an_empty_job_and_empty_tensors_are_written();
#ifdef REFIT_FAULTS
  for (const int threads : {1, 2}) {
    states_are_exact_at_every_fault(fault::Point::kRead, threads);
    states_are_exact_at_every_fault(fault::Point::kCopy, threads);
  }
  a_lack_of_memory_for_buffers_changes_nothing();
#endif
  return refit::test::finish("write_test");
}
