#include "cuda/weights/write.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "core/checksum.h"
#include "core/fault.h"
#include "core/pool.h"
#include "cuda/device/check.h"
#include "cuda/device/pinned_ring.h"
#include "cuda/weights/checksum.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/pace.h"
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
  State(std::vector<GpuParams> given, int threads, double rate)
      : sets(std::move(given)), ranks(*sets.front().ranks), pool(threads), shared(ranks), mappings(shared, pool) {
    writers.resize(ranks.size());
    checksums.resize(ranks.size());
    for (size_t r = 0; r < ranks.size(); r++) paces.emplace_back(rate), unpaced.emplace_back(0);
  }
  ~State() {
    // Run on the threads that created them. On a lost GPU these calls only fail.
    try {
      on_all(ranks, [this](Rank& rank) {
        writers[static_cast<size_t>(rank.index)].reset();
        checksums[static_cast<size_t>(rank.index)].reset();
        if (rank.index == 0) ring.reset();
      });
    } catch (const std::exception&) {
    }
  }

  const GpuParams& params(int set) const { return sets[static_cast<size_t>(set)]; }

  const std::vector<GpuParams> sets;
  std::vector<std::unique_ptr<Rank>>& ranks;
  Pool pool;
  GpuIpc shared;
  ipc::Mappings mappings;  // its destructor closes kept mappings
  std::unique_ptr<PinnedRing> ring;
  std::vector<std::unique_ptr<RankWriter>> writers;
  std::vector<std::unique_ptr<Checksum>> checksums;
  std::vector<Pace> paces, unpaced;  // each rank's: for weights, and for adapters, which are small
};

GpuStore::GpuStore(std::vector<GpuParams> sets, int threads, uint64_t ring_bytes, double rate)
    : state_(std::make_unique<State>(std::move(sets), threads, rate)) {
  if (ring_bytes / kSlots < static_cast<uint64_t>(kBatchLimits.row + kBatchLimits.straight))
    throw std::invalid_argument("a ring of " + std::to_string(ring_bytes) + " bytes has slots too small for a chunk");
  State& s = *state_;
  on_all(s.ranks, [&s, ring_bytes](Rank& rank) {
    rank.doing("weights: buffers");
    if (rank.index == 0) s.ring = std::make_unique<PinnedRing>(kSlots, ring_bytes / kSlots);
    s.writers[static_cast<size_t>(rank.index)] = std::make_unique<RankWriter>(kSlots);
    s.checksums[static_cast<size_t>(rank.index)] = std::make_unique<Checksum>();
  });
}

GpuStore::~GpuStore() = default;

WriteOutcome GpuStore::write(const WriteJob& job, int set) {
  State& s = *state_;
  const GpuParams& params = s.params(set);
  for (const Rect& rect : job.rects) {
    const Tensor& tensor = job.tensors[static_cast<size_t>(rect.tensor)];
    if (params.halves(rect.param) == 1 || (tensor.dtype == DType::kFloat32 && tensor.rows_are_packed())) continue;
    return nothing_written(job, "a float32 parameter takes float32 tensors whose rows are packed");
  }
  const bool any_weights = std::any_of(job.rects.begin(), job.rects.end(),
                                       [&](const Rect& rect) { return is_weight(params.shapes[rect.param]); });
  std::unique_ptr<WriteRun> run;
  try {
    run = std::make_unique<WriteRun>(params, job, *s.ring, s.writers, any_weights ? s.paces : s.unpaced, s.mappings);
  } catch (const std::bad_alloc&) {
    return nothing_written(job, "no memory for read buffers");
  }
  run->run(s.pool);
  return run->outcome();
}

uint64_t GpuStore::close_mappings(const std::string& name) {
  State& s = *state_;
  uint64_t closed = 0;
  Rank& rank = *s.ranks.front();
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
  Rank& rank = *s.ranks[static_cast<size_t>(s.shared.nearest(segment.uuid))];
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

void GpuStore::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t given_cols, uint8_t* out,
                    int set) {
  if (rows <= 0 || given_cols <= 0) return;
  State& s = *state_;
  const GpuParams& params = s.params(set);
  Rank& r = *s.ranks[static_cast<size_t>(rank)];
  r.run([&] {
     const int64_t halves = params.halves(param), cols = halves * given_cols;
     const int64_t pitch = halves * params.shapes[static_cast<size_t>(param)].cols;
     const Element* from = params.at(rank, param) + row * pitch + halves * col;
     const auto room = static_cast<int64_t>(s.ring->slot_bytes() / sizeof(Element));
     const int64_t width = std::min(cols, room);
     const int64_t height = std::clamp<int64_t>(room / width, 1, rows);
     for (int64_t i = 0; i < rows; i += height) {
       for (int64_t k = 0; k < cols; k += width) {
         const int64_t h = std::min(height, rows - i);
         const auto bytes = static_cast<size_t>(std::min(width, cols - k)) * sizeof(Element);
         r.doing("weights: read");
         check(cudaMemcpy2DAsync(s.ring->slot(0), bytes, from + i * pitch + k,
                                 static_cast<size_t>(pitch) * sizeof(Element), bytes, static_cast<size_t>(h),
                                 cudaMemcpyDeviceToHost, r.copy),
               "weights: read");
         check(cudaStreamSynchronize(r.copy), "weights: read");
         for (int64_t j = 0; j < h; j++) {
           std::memcpy(out + ((i + j) * cols + k) * static_cast<int64_t>(sizeof(Element)),
                       s.ring->slot(0) + static_cast<size_t>(j) * bytes, bytes);
         }
       }
     }
   }).get();
}

std::vector<uint64_t> GpuStore::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                         int set) {
  State& s = *state_;
  const GpuParams& params = s.params(set);
  std::vector<uint64_t> out(rects.size());
  on_all(s.ranks, [&](Rank& rank) {
    std::vector<SumRect> mine;
    std::vector<size_t> at;
    for (size_t i = 0; i < rects.size(); i++) {
      const Rect& rect = rects[i];
      if (rect.rank != rank.index || params.halves(rect.param) != 1) continue;
      const Param& shape = params.shapes[static_cast<size_t>(rect.param)];
      const int64_t cols = tensor_cols[static_cast<size_t>(rect.tensor)];
      mine.push_back({params.at(rect.rank, rect.param) + rect.dst_row * shape.cols + rect.dst_col, rect.rows, rect.cols,
                      shape.cols, static_cast<uint64_t>(rect.src_row * cols + rect.src_col), cols});
      at.push_back(i);
    }
    rank.doing("weights: checksum");
    const std::vector<uint64_t> sums = s.checksums[static_cast<size_t>(rank.index)]->run(mine, rank.stream);
    for (size_t i = 0; i < sums.size(); i++) out[at[i]] = sums[i];
  });
  for (size_t i = 0; i < rects.size(); i++) {
    if (params.halves(rects[i].param) != 1) out[i] = checksum_on_host(rects[i], tensor_cols, set);
  }
  return out;
}

// Parameters in float32 are small.
uint64_t GpuStore::checksum_on_host(const Rect& rect, const std::vector<int64_t>& tensor_cols, int set) {
  const DType dtype = state_->params(set).shapes[static_cast<size_t>(rect.param)].dtype;
  std::vector<uint8_t> bytes(static_cast<size_t>(rect.rows * rect.cols) * size_of(dtype));
  read(rect.rank, rect.param, rect.dst_row, rect.dst_col, rect.rows, rect.cols, bytes.data(), set);
  uint64_t sum = 0;
  for (int64_t r = 0; r < rect.rows; r++) {
    const int64_t first = (rect.src_row + r) * tensor_cols[static_cast<size_t>(rect.tensor)] + rect.src_col;
    sum += checksum_run(bytes.data() + static_cast<size_t>(r * rect.cols) * size_of(dtype), dtype,
                        static_cast<uint64_t>(first), rect.cols);
  }
  return sum;
}

void GpuStore::scramble(uint64_t seed, int set) {
  State& s = *state_;
  const GpuParams& params = s.params(set);
  on_all(s.ranks, [&](Rank& rank) {
    rank.doing("weights: scramble");
    for (size_t p = 0; p < params.shapes.size(); p++) {
      const Param& shape = params.shapes[p];
      if (!is_weight(shape)) continue;
      cuda::scramble(params.at(rank.index, static_cast<int>(p)), shape.rows * shape.cols, seed,
                     static_cast<uint64_t>(rank.index) * params.shapes.size() + p, rank.stream);
    }
    check(cudaStreamSynchronize(rank.stream), "weights: scramble");
  });
}

void GpuStore::copy(const std::vector<Rect>& rects, int from, int to) {
  State& s = *state_;
  const GpuParams &source = s.params(from), &target = s.params(to);
  if (REFIT_FAULT(kCopy)) throw std::runtime_error("injected fault: copy");
  on_all(s.ranks, [&](Rank& rank) {
    std::vector<Copy2d> copies;
    for (const Rect& rect : rects) {
      if (rect.rank != rank.index || rect.rows == 0 || rect.cols == 0) continue;
      const int64_t halves = source.halves(rect.param), pitch = halves * source.shapes[rect.param].cols;
      const int64_t at = rect.dst_row * pitch + halves * rect.dst_col;
      copies.push_back({source.at(rect.rank, rect.param) + at, target.at(rect.rank, rect.param) + at, rect.rows,
                        halves * rect.cols, pitch * static_cast<int64_t>(sizeof(Element)), sizeof(Element), pitch,
                        kElementType});
    }
    Scatter& scatter = s.writers[static_cast<size_t>(rank.index)]->scatter;
    paced(copies, s.paces[static_cast<size_t>(rank.index)], [&](const std::vector<Copy2d>& slice) {
      rank.doing("weights: copy to the other set");
      scatter.run(slice, rank.stream);
      return true;
    });
    check(cudaStreamSynchronize(rank.stream), "weights: copy to the other set");
  });
}

}  // namespace refit::cuda
