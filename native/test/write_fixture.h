// A job with its sources, and a check of every byte that it writes. For write_test.cc.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/store.h"
#include "core/write/write.h"
#include "core/write/write_check.h"
#include "test/check.h"
#include "test/random.h"

using namespace refit;
using test::Random;

namespace {

// The bits of an element: any pattern, NaN and infinities included.
uint32_t coded(int tensor, int64_t index, DType dtype) {
  const uint64_t z = (static_cast<uint64_t>(tensor) << 40) + static_cast<uint64_t>(index) + 1;
  const uint64_t mixed = (z * 0x9E3779B97F4A7C15u) ^ ((z * 0xBF58476D1CE4E5B9u) >> 31);
  return static_cast<uint32_t>(size_of(dtype) == 2 ? mixed >> 48 : mixed >> 32);
}

// A job with its sources, in files or in memory.
struct Fixture {
  CoreConfig config;
  WriteJob job;
  std::vector<std::vector<uint8_t>> bytes;  // of each source
  std::vector<int> fds;

  ~Fixture() {
    for (const int fd : fds) close(fd);
  }

  // Appends a tensor to source 0, after `gap` bytes.
  int add_tensor(DType dtype, int64_t rows, int64_t cols, uint64_t gap, uint64_t extra_pitch) {
    if (bytes.empty()) bytes.emplace_back();
    const int index = static_cast<int>(job.tensors.size());
    const uint64_t element = size_of(dtype);
    const Tensor tensor{
        0, bytes[0].size() + gap, dtype, rows, cols, static_cast<uint64_t>(cols) * element + extra_pitch, element};
    job.tensors.push_back(tensor);
    bytes[0].resize(tensor.offset + static_cast<uint64_t>(rows) * tensor.row_bytes, 0xEE);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < cols; c++) {
        const uint32_t bits = coded(index, r * cols + c, dtype);
        std::memcpy(&bytes[0][tensor.offset + static_cast<uint64_t>(r) * tensor.row_bytes +
                              static_cast<uint64_t>(c) * size_of(dtype)],
                    &bits, size_of(dtype));
      }
    }
    return index;
  }

  void in_memory() {
    job.sources.clear();
    for (const auto& b : bytes) job.sources.push_back({-1, b.data(), b.size()});
  }

  void in_files() {
    job.sources.clear();
    for (const auto& b : bytes) {
      const int fd = memfd_create("refit-test", MFD_CLOEXEC);
      CHECK(write(fd, b.data(), b.size()) == static_cast<ssize_t>(b.size()));
      fds.push_back(fd);
      job.sources.push_back({fd, nullptr, 0});
    }
  }

  // The expected parameters when the tensors in `written` are written over `before`.
  std::vector<std::vector<uint8_t>> expected(const std::vector<std::vector<uint8_t>>& before,
                                             const std::vector<bool>& written) const {
    auto out = before;
    for (const Rect& rect : job.rects) {
      if (!written[rect.tensor]) continue;
      const Tensor& tensor = job.tensors[rect.tensor];
      const Param& param = config.params[rect.param];
      const size_t element = size_of(param.dtype);
      for (int64_t r = 0; r < rect.rows; r++) {
        for (int64_t c = 0; c < rect.cols; c++) {
          const int64_t from = (rect.src_row + r) * tensor.cols + rect.src_col + c;
          const int64_t to = (rect.dst_row + r) * param.cols + rect.dst_col + c;
          const uint32_t bits = convert_bits(tensor.dtype, param.dtype, coded(rect.tensor, from, tensor.dtype));
          std::memcpy(&out[rect.rank * config.params.size() + rect.param][static_cast<size_t>(to) * element], &bits,
                      element);
        }
      }
    }
    return out;
  }
};

std::vector<std::vector<uint8_t>> contents(const Store& store) {
  std::vector<std::vector<uint8_t>> out;
  for (int rank = 0; rank < store.ranks(); rank++) {
    for (int p = 0; p < store.params(); p++) {
      const auto* data = static_cast<const uint8_t*>(store.param(rank, p));
      const size_t bytes =
          static_cast<size_t>(store.shape(p).rows * store.shape(p).cols) * size_of(store.shape(p).dtype);
      out.emplace_back(data, data + bytes);
    }
  }
  return out;
}

// Tensors over `ranks` ranks: column-split, row-split, replicated, a vector and an expert-like one.
std::unique_ptr<Fixture> model_like(DType store, DType file, int ranks, int64_t scale, uint64_t gap) {
  auto f = std::make_unique<Fixture>();
  f->config.ranks = ranks;
  const int64_t n = 8 * scale;
  f->config.params = {{"rows", n, n}, {"cols", n, n}, {"copy", n, 3}, {"vector", n * ranks, 1}, {"experts", 4 * n, n}};
  for (Param& param : f->config.params) param.dtype = store;
  const int rows = f->add_tensor(file, n * ranks, n, gap, 0);
  const int cols = f->add_tensor(file, n, n * ranks, gap, 0);
  const int copy = f->add_tensor(file, n, 3, gap, 0);
  const int vector = f->add_tensor(file, n * ranks, 1, gap, 0);
  const int experts = f->add_tensor(file, 4 * n, n * ranks, gap, 0);
  for (int r = 0; r < ranks; r++) f->job.rects.push_back({rows, r, 0, r * n, 0, n, n, 0, 0});
  for (int r = 0; r < ranks; r++) f->job.rects.push_back({cols, r, 1, 0, r * n, n, n, 0, 0});
  for (int r = 0; r < ranks; r++) f->job.rects.push_back({copy, r, 2, 0, 0, n, 3, 0, 0});
  for (int r = 0; r < ranks; r++) f->job.rects.push_back({vector, r, 3, 0, 0, n * ranks, 1, 0, 0});
  for (int e = 3; e >= 0; e--) {
    for (int r = 0; r < ranks; r++) f->job.rects.push_back({experts, r, 4, e * n, r * n, n, n, (3 - e) * n, 0});
  }
  return f;
}

void check_all(const Fixture& f, Store& store, Pool& pool, const char* what) {
  check_write(f.job, f.config.ranks, f.config.params);
  store.scramble(11, pool);
  const auto before = contents(store);
  const WriteOutcome outcome = store.write(f.job, pool);
  CHECKF(outcome.error.empty(), "%s: %s", what, outcome.error.c_str());
  bool written = true;
  for (const uint8_t state : outcome.states) written = written && state == static_cast<uint8_t>(TensorState::kWritten);
  CHECKF(written, "%s", what);
  CHECKF(contents(store) == f.expected(before, std::vector<bool>(f.job.tensors.size(), true)), "%s", what);
}

}  // namespace
