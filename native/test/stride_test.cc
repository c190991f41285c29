// Views whose columns are not adjacent: transposed, stepped, expanded. They are compared element by element with a
// plain loop.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/store.h"
#include "core/write/write_check.h"
#include "core/write/write_plan.h"
#include "test/check.h"
#include "test/random.h"

using namespace refit;
using test::Random;

namespace {

std::vector<uint8_t> coded_bytes(size_t count, uint64_t seed) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; i++) {
    bytes[i] = static_cast<uint8_t>(((i + seed) * 0x9E3779B97F4A7C15u) >> 56);
  }
  return bytes;
}

uint32_t bits_at(const std::vector<uint8_t>& bytes, uint64_t at, DType dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, &bytes[at], size_of(dtype));
  return bits;
}

// A temporary file, which the destructor closes.
struct File {
  int fd;
  explicit File(const std::vector<uint8_t>& bytes) : fd(memfd_create("refit-test", MFD_CLOEXEC)) {
    CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }
  ~File() { close(fd); }
};

// Writes the job from memory and from a file, and compares all parameters with a plain loop over the rectangles.
void check_job(const CoreConfig& config, WriteJob job, const std::vector<uint8_t>& bytes, const std::string& what) {
  Store store(config);
  Pool pool(2);
  const File file(bytes);
  for (const bool from_file : {false, true}) {
    job.sources = {from_file ? Source{file.fd, nullptr, 0} : Source{-1, bytes.data(), bytes.size()}};
    check_write(job, config.ranks, config.params);
    store.scramble(7, pool);
    std::vector<std::vector<uint8_t>> expected;
    for (int rank = 0; rank < config.ranks; rank++) {
      for (size_t p = 0; p < config.params.size(); p++) {
        const auto* data = static_cast<const uint8_t*>(store.param(rank, static_cast<int>(p)));
        expected.emplace_back(data, data + static_cast<size_t>(config.params[p].rows * config.params[p].cols) *
                                               size_of(config.params[p].dtype));
      }
    }
    for (const Rect& rect : job.rects) {
      const Tensor& tensor = job.tensors[rect.tensor];
      const DType to_dtype = config.params[rect.param].dtype;
      auto& param = expected[rect.rank * config.params.size() + rect.param];
      for (int64_t r = 0; r < rect.rows; r++) {
        for (int64_t c = 0; c < rect.cols; c++) {
          const uint64_t from = tensor.offset + static_cast<uint64_t>(rect.src_row + r) * tensor.row_bytes +
                                static_cast<uint64_t>(rect.src_col + c) * tensor.col_bytes;
          const uint32_t bits = convert_bits(tensor.dtype, to_dtype, bits_at(bytes, from, tensor.dtype));
          const int64_t to = (rect.dst_row + r) * config.params[rect.param].cols + rect.dst_col + c;
          std::memcpy(&param[static_cast<size_t>(to) * size_of(to_dtype)], &bits, size_of(to_dtype));
        }
      }
    }
    const WriteOutcome outcome = store.write(job, pool);
    CHECKF(outcome.error.empty(), "%s: %s", what.c_str(), outcome.error.c_str());
    for (const uint8_t state : outcome.states) CHECK(state == static_cast<uint8_t>(TensorState::kWritten));
    for (size_t i = 0; i < expected.size(); i++) {
      const int rank = static_cast<int>(i / config.params.size());
      const int p = static_cast<int>(i % config.params.size());
      CHECKF(std::memcmp(store.param(rank, p), expected[i].data(), expected[i].size()) == 0,
             "%s, rank %d, param %d, %s", what.c_str(), rank, p, from_file ? "file" : "memory");
    }
  }
}

void a_transposed_tensor_is_written_and_its_file_is_read_once() {
  for (const DType from : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    const uint64_t element = size_of(from);
    const int64_t rows = 700, cols = 900;
    CoreConfig config;
    config.ranks = 2;
    config.params = {{"by_rows", rows / 2, cols}, {"by_cols", rows, cols / 2}};
    WriteJob job;
    // Stored as [cols, rows]: adjacent elements of a row are one stored row apart.
    job.tensors = {{0, 3, from, rows, cols, element, static_cast<uint64_t>(rows) * element},
                   {0, 3, from, rows, cols, element, static_cast<uint64_t>(rows) * element}};
    for (int rank = 0; rank < 2; rank++) job.rects.push_back({0, rank, 0, rank * rows / 2, 0, rows / 2, cols, 0, 0});
    for (int rank = 0; rank < 2; rank++) job.rects.push_back({1, rank, 1, 0, rank * cols / 2, rows, cols / 2, 0, 0});
    const std::vector<uint8_t> bytes = coded_bytes(3 + static_cast<size_t>(rows * cols) * element, 1);
    check_job(config, job, bytes, "transposed");

    const File file(bytes);
    job.sources = {{file.fd, nullptr, 0}};
    Store store(config);
    Pool pool(2);
    const WriteOutcome outcome = store.write(job, pool);
    CHECKF(outcome.bytes == 2 * static_cast<uint64_t>(rows * cols) * element, "%lu",
           static_cast<unsigned long>(outcome.bytes));
    const WritePlan plan = plan_write(job, config.params);
    CHECKF(plan.chunks.size() > 4 && plan.scratch <= (256 << 10), "%zu chunks, %lu bytes", plan.chunks.size(),
           static_cast<unsigned long>(plan.scratch));
    for (const Chunk& chunk : plan.chunks) CHECK(!chunk.straight);
  }
}

void a_stepped_tensor_is_written() {
  for (const DType to : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const DType from : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      const uint64_t element = size_of(from);
      CoreConfig config;
      config.params = {{"a", 40, 700}, {"vector", 3000, 1}};
      for (Param& param : config.params) param.dtype = to;
      WriteJob job;
      // w[:, ::3] of a [40, 2100] tensor, and v[::5].
      job.tensors = {{0, 1, from, 40, 700, 2100 * element, 3 * element},
                     {0, 0, from, 3000, 1, 5 * element, 123456789}};  // one column: its stride does not matter
      job.rects = {{0, 0, 0, 1, 2, 39, 698, 0, 1}, {1, 0, 1, 0, 0, 3000, 1, 0, 0}};
      check_job(config, job, coded_bytes(1 + 40 * 2100 * element, 2), "stepped");
    }
  }
}

void an_expanded_tensor_is_written() {
  CoreConfig config;
  config.params = {{"a", 30, 500}, {"b", 30, 500}, {"c", 30, 500}};
  WriteJob job;
  job.tensors = {{0, 2, DType::kBFloat16, 30, 500, 2, 0},    // one column for all
                 {0, 2, DType::kFloat32, 30, 500, 0, 8},     // one (stepped) row for all
                 {0, 11, DType::kBFloat16, 30, 500, 0, 0}};  // one element
  for (int t = 0; t < 3; t++) job.rects.push_back({t, 0, t, 0, 0, 30, 500, 0, 0});
  check_job(config, job, coded_bytes(5000, 3), "expanded");
}

void random_views_arrive(uint64_t seed) {
  Random random(seed);
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  CoreConfig config;
  config.ranks = static_cast<int>(1 + random.below(3));
  const int params = static_cast<int>(1 + random.below(3));
  WriteJob job;
  uint64_t end = 1;
  std::vector<std::vector<Rect>> of_tensor;
  for (int p = 0; p < params; p++) {
    const DType dtype = dtypes[random.below(3)];
    config.params.push_back({"p", 1 + random.below(90), 1 + random.below(90), dtype});
  }
  for (int t = 0; t < 3; t++) {
    Tensor tensor;
    tensor.dtype = dtypes[random.below(3)];
    tensor.rows = 1 + random.below(80);
    tensor.cols = 1 + random.below(80);
    const uint64_t element = size_of(tensor.dtype);
    const uint64_t step = element * static_cast<uint64_t>(1 + random.below(3));
    const uint64_t extra = static_cast<uint64_t>(random.below(9));
    if (random.below(2) == 0) {
      tensor.row_bytes = step;
      tensor.col_bytes = static_cast<uint64_t>(tensor.rows) * step + extra;
    } else {
      tensor.col_bytes = step;
      tensor.row_bytes = static_cast<uint64_t>(tensor.cols) * step + extra;
    }
    tensor.offset = static_cast<uint64_t>(random.below(20));
    end = std::max(end, tensor.at(tensor.rows - 1, tensor.cols - 1) + element);
    job.tensors.push_back(tensor);
    of_tensor.emplace_back();
  }
  for (int rank = 0; rank < config.ranks; rank++) {
    for (int p = 0; p < params; p++) {
      const Param& param = config.params[p];
      const int64_t grid_rows = 1 + random.below(3), grid_cols = 1 + random.below(3);
      for (int64_t i = 0; i < grid_rows; i++) {
        for (int64_t j = 0; j < grid_cols; j++) {
          const int t = static_cast<int>(random.below(3));
          const Tensor& tensor = job.tensors[t];
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
  for (const auto& rects : of_tensor) job.rects.insert(job.rects.end(), rects.begin(), rects.end());
  check_job(config, job, coded_bytes(end, seed), "random view, seed " + std::to_string(seed));
}

// With any limits, the chunks together have all needed elements, each once per rectangle.
void chunks_cover_every_rectangle_once(uint64_t seed) {
  Random random(seed);
  WriteJob job;
  job.sources = {{0, nullptr, 0}};
  const bool transposed = random.below(2) == 0;
  const int64_t rows = 1 + random.below(60), cols = 1 + random.below(60);
  job.tensors = {{0, 0, DType::kFloat32, rows, cols, 4, static_cast<uint64_t>(rows) * 4}};
  if (!transposed) {
    job.tensors[0].row_bytes = static_cast<uint64_t>(cols) * 12;
    job.tensors[0].col_bytes = 12;
  }
  const std::vector<Param> params = {{"p", 60, 60}};
  const int count = static_cast<int>(1 + random.below(5));
  for (int i = 0; i < count; i++) {
    Rect rect{0, i, 0, random.below(rows), random.below(cols), 0, 0, 0, 0};
    rect.rows = 1 + random.below(rows - rect.src_row);
    rect.cols = 1 + random.below(cols - rect.src_col);
    job.rects.push_back(rect);
  }
  const ChunkLimits limits{static_cast<uint64_t>(1 + random.below(3000)), static_cast<uint64_t>(1 + random.below(800)),
                           static_cast<uint64_t>(1 + random.below(900))};
  const WritePlan plan = plan_write(job, params, limits);
  std::vector<int> times(static_cast<size_t>(count * rows * cols));
  for (const Chunk& chunk : plan.chunks) {
    for (size_t k = 0; k < chunk.rects; k++) {
      const int i = plan.rects[chunk.first_rect + k];
      const Rect& rect = job.rects[i];
      for (int64_t r = std::max(chunk.row, rect.src_row);
           r < std::min(chunk.row + chunk.rows, rect.src_row + rect.rows); r++) {
        for (int64_t c = std::max(chunk.col, rect.src_col);
             c < std::min(chunk.col + chunk.cols, rect.src_col + rect.cols); c++) {
          times[static_cast<size_t>((i * rows + r) * cols + c)]++;
        }
      }
    }
  }
  for (int i = 0; i < count; i++) {
    const Rect& rect = job.rects[i];
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < cols; c++) {
        const bool needed =
            r >= rect.src_row && r < rect.src_row + rect.rows && c >= rect.src_col && c < rect.src_col + rect.cols;
        CHECKF(times[static_cast<size_t>((i * rows + r) * cols + c)] == (needed ? 1 : 0), "seed %lu",
               static_cast<unsigned long>(seed));
      }
    }
  }
}

void strides_out_of_bounds_are_refused() {
  const std::vector<Param> params = {{"p", 8, 8}};
  const std::vector<uint8_t> memory(1000);
  const auto with = [&](int64_t rows, int64_t cols, uint64_t row_bytes, uint64_t col_bytes, uint64_t offset) {
    WriteJob job;
    job.sources = {{-1, memory.data(), memory.size()}};
    job.tensors = {{0, offset, DType::kFloat32, rows, cols, row_bytes, col_bytes}};
    job.rects = {{0, 0, 0, 0, 0, 1, 1, 0, 0}};
    return job;
  };
  check_write(with(8, 8, 4, 32, 0), 1, params);
  check_write(with(8, 8, 4, 32, 1000 - 256), 1, params);
  check_write(with(10, 10, 0, 0, 996), 1, params);
  check_write(with(10, 1, 4, std::numeric_limits<uint64_t>::max(), 0), 1, params);
  CHECK_THROWS(check_write(with(8, 8, 4, 32, 1000 - 255), 1, params), std::invalid_argument);
  CHECK_THROWS(check_write(with(10, 10, 0, 0, 997), 1, params), std::invalid_argument);
  CHECK_THROWS(check_write(with(8, 8, 4, 142, 0), 1, params), std::invalid_argument);
  CHECK_THROWS(check_write(with(8, 8, 28, 4, 0), 1, params), std::invalid_argument);
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  for (const uint64_t stride : {huge, huge / 7, huge / 7 + 1, huge / 2 + 1, huge - 27}) {
    CHECK_THROWS(check_write(with(8, 8, 4, stride, 0), 1, params), std::invalid_argument);
    CHECK_THROWS(check_write(with(8, 8, stride, 32, 0), 1, params), std::invalid_argument);
    CHECK_THROWS(check_write(with(8, 8, stride, stride, 0), 1, params), std::invalid_argument);
  }
}

}  // namespace

int main() {
  a_transposed_tensor_is_written_and_its_file_is_read_once();
  a_stepped_tensor_is_written();
  an_expanded_tensor_is_written();
  for (uint64_t seed = 0; seed < 300; seed++) random_views_arrive(seed);
  for (uint64_t seed = 0; seed < 300; seed++) chunks_cover_every_rectangle_once(seed);
  strides_out_of_bounds_are_refused();
  return refit::test::finish("stride_test");
}
