#include "cuda/weights/write.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/checksum.h"
#include "core/pool.h"
#include "cuda/device/check.h"
#include "cuda/device/pinned_ring.h"
#include "cuda/weights/checksum.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/scramble.h"
#include "cuda/weights/write_run.h"
#include "transport/ipc/ipc_fetch.h"

namespace refit::cuda {
namespace {

constexpr size_t kSlots = 16;
static_assert(GpuStore::kRingBytes % kSlots == 0);

WriteOutcome nothing_written(const WriteJob& job, const char* error) {
  WriteOutcome out;
  out.states.assign(job.tensors.size(), static_cast<uint8_t>(TensorState::kUntouched));
  out.error = error;
  return out;
}

}  // namespace

struct GpuStore::State {
  State(GpuParams given, int threads)
      : params(std::move(given)), pool(threads), shared(*params.ranks), mappings(shared, pool) {
    writers.resize(params.ranks->size());
    checksums.resize(params.ranks->size());
  }
  ~State() {
    // Run on the threads that created them. On a lost GPU these calls only fail.
    try {
      on_all(*params.ranks, [this](Rank& rank) {
        writers[static_cast<size_t>(rank.index)].reset();
        checksums[static_cast<size_t>(rank.index)].reset();
        if (rank.index == 0) ring.reset();
      });
    } catch (const std::exception&) {
    }
  }

  const GpuParams params;
  Pool pool;
  GpuIpc shared;
  ipc::Mappings mappings;  // its destructor closes kept mappings
  std::unique_ptr<PinnedRing> ring;
  std::vector<std::unique_ptr<RankWriter>> writers;
  std::vector<std::unique_ptr<Checksum>> checksums;
};

GpuStore::GpuStore(GpuParams params, int threads, uint64_t ring_bytes)
    : state_(std::make_unique<State>(std::move(params), threads)) {
  State& s = *state_;
  on_all(*s.params.ranks, [&s, ring_bytes](Rank& rank) {
    rank.doing("weights: buffers");
    if (rank.index == 0) s.ring = std::make_unique<PinnedRing>(kSlots, ring_bytes / kSlots);
    s.writers[static_cast<size_t>(rank.index)] = std::make_unique<RankWriter>(kSlots);
    s.checksums[static_cast<size_t>(rank.index)] = std::make_unique<Checksum>();
  });
}

GpuStore::~GpuStore() = default;

WriteOutcome GpuStore::write(const WriteJob& job) {
  State& s = *state_;
  for (const Rect& rect : job.rects) {
    const Tensor& tensor = job.tensors[static_cast<size_t>(rect.tensor)];
    if (s.params.halves(rect.param) == 1 || (tensor.dtype == DType::kFloat32 && tensor.rows_are_packed())) continue;
    return nothing_written(job, "a float32 parameter takes float32 tensors whose rows are packed");
  }
  std::unique_ptr<WriteRun> run;
  try {
    run = std::make_unique<WriteRun>(s.params, job, *s.ring, s.writers, s.mappings);
  } catch (const std::bad_alloc&) {
    return nothing_written(job, "no memory for read buffers");
  }
  run->run(s.pool);
  return run->outcome();
}

uint64_t GpuStore::close_mappings(const std::string& name) {
  State& s = *state_;
  uint64_t closed = 0;
  Rank& rank = *s.params.ranks->front();
  rank.run([&] {
        rank.doing("weights: close shared memory");
        closed = s.mappings.close(name);
      })
      .get();
  return closed;
}

void GpuStore::fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) {
  State& s = *state_;
  if (bytes == 0) return;
  Rank& rank = *(*s.params.ranks)[static_cast<size_t>(s.shared.nearest(segment.uuid))];
  ipc::await_events(s.shared, rank.index, segment, timeout_ms);
  auto done = rank.run([&] {
    rank.doing("weights: open shared memory");
    const ipc::FetchMapping mapping(s.shared, rank.index, segment, offset, bytes);
    for (uint64_t at = 0; at < bytes; at += s.ring->slot_bytes()) {
      const auto size = static_cast<size_t>(std::min<uint64_t>(s.ring->slot_bytes(), bytes - at));
      rank.doing("weights: read shared memory");
      check(cudaMemcpyAsync(s.ring->slot(0), mapping.data() + at, size, cudaMemcpyDefault, rank.copy),
            "weights: fetch");
      check(cudaStreamSynchronize(rank.copy), "weights: fetch");
      std::memcpy(out + at, s.ring->slot(0), size);
    }
    rank.doing("weights: close shared memory");
  });
  wait(done);
}

void GpuStore::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t given_cols, uint8_t* out) {
  if (rows <= 0 || given_cols <= 0) return;
  State& s = *state_;
  Rank& r = *(*s.params.ranks)[static_cast<size_t>(rank)];
  r.run([&] {
     const int64_t halves = s.params.halves(param), cols = halves * given_cols;
     const int64_t pitch = halves * s.params.shapes[static_cast<size_t>(param)].cols;
     const bf16* from = s.params.at(rank, param) + row * pitch + halves * col;
     const auto room = static_cast<int64_t>(s.ring->slot_bytes() / sizeof(bf16));
     const int64_t width = std::min(cols, room);
     const int64_t height = std::clamp<int64_t>(room / width, 1, rows);
     for (int64_t i = 0; i < rows; i += height) {
       for (int64_t k = 0; k < cols; k += width) {
         const int64_t h = std::min(height, rows - i);
         const auto bytes = static_cast<size_t>(std::min(width, cols - k)) * sizeof(bf16);
         r.doing("weights: read");
         check(
             cudaMemcpy2DAsync(s.ring->slot(0), bytes, from + i * pitch + k, static_cast<size_t>(pitch) * sizeof(bf16),
                               bytes, static_cast<size_t>(h), cudaMemcpyDeviceToHost, r.copy),
             "weights: read");
         check(cudaStreamSynchronize(r.copy), "weights: read");
         for (int64_t j = 0; j < h; j++) {
           std::memcpy(out + ((i + j) * cols + k) * static_cast<int64_t>(sizeof(bf16)),
                       s.ring->slot(0) + static_cast<size_t>(j) * bytes, bytes);
         }
       }
     }
   }).get();
}

std::vector<uint64_t> GpuStore::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols) {
  State& s = *state_;
  std::vector<uint64_t> out(rects.size());
  on_all(*s.params.ranks, [&](Rank& rank) {
    std::vector<SumRect> mine;
    std::vector<size_t> at;
    for (size_t i = 0; i < rects.size(); i++) {
      const Rect& rect = rects[i];
      if (rect.rank != rank.index || s.params.halves(rect.param) != 1) continue;
      const Param& shape = s.params.shapes[static_cast<size_t>(rect.param)];
      const int64_t cols = tensor_cols[static_cast<size_t>(rect.tensor)];
      mine.push_back({s.params.at(rect.rank, rect.param) + rect.dst_row * shape.cols + rect.dst_col, rect.rows,
                      rect.cols, shape.cols, static_cast<uint64_t>(rect.src_row * cols + rect.src_col), cols});
      at.push_back(i);
    }
    rank.doing("weights: checksum");
    const std::vector<uint64_t> sums = s.checksums[static_cast<size_t>(rank.index)]->run(mine, rank.stream);
    for (size_t i = 0; i < sums.size(); i++) out[at[i]] = sums[i];
  });
  for (size_t i = 0; i < rects.size(); i++) {
    if (s.params.halves(rects[i].param) != 1) out[i] = checksum_on_host(rects[i], tensor_cols);
  }
  return out;
}

// Parameters in float32 are small.
uint64_t GpuStore::checksum_on_host(const Rect& rect, const std::vector<int64_t>& tensor_cols) {
  const DType dtype = state_->params.shapes[static_cast<size_t>(rect.param)].dtype;
  std::vector<uint8_t> bytes(static_cast<size_t>(rect.rows * rect.cols) * size_of(dtype));
  read(rect.rank, rect.param, rect.dst_row, rect.dst_col, rect.rows, rect.cols, bytes.data());
  uint64_t sum = 0;
  for (int64_t r = 0; r < rect.rows; r++) {
    const int64_t first = (rect.src_row + r) * tensor_cols[static_cast<size_t>(rect.tensor)] + rect.src_col;
    sum += checksum_run(bytes.data() + static_cast<size_t>(r * rect.cols) * size_of(dtype), dtype,
                        static_cast<uint64_t>(first), rect.cols);
  }
  return sum;
}

void GpuStore::scramble(uint64_t seed) {
  State& s = *state_;
  on_all(*s.params.ranks, [&](Rank& rank) {
    rank.doing("weights: scramble");
    for (size_t p = 0; p < s.params.shapes.size(); p++) {
      const Param& shape = s.params.shapes[p];
      if (!is_weight(shape)) continue;
      cuda::scramble(s.params.at(rank.index, static_cast<int>(p)), shape.rows * shape.cols, seed,
                     static_cast<uint64_t>(rank.index) * s.params.shapes.size() + p, rank.stream);
    }
    check(cudaStreamSynchronize(rank.stream), "weights: scramble");
  });
}

}  // namespace refit::cuda
