// build/stand-in/librefit_cuda.so, made by `node scripts/build-native.js --faults` for tests only: a CUDA library that
// needs no GPU. Name it in REFIT_CUDA_LIBRARY, with build/faults/refit.node as REFIT_NATIVE, and use the device "cuda".
// It computes on the CPU and "opens" memory of other processes through the same code as the real library
// (transport/ipc/*). Planning, order, overlap, counting, keeping and closing are the product's code, with fault points.
//
// GPUs: $REFIT_STAND_IN_CARDS of them (default 2), with the UUIDs GPU-00000000-0000-0000-0000-00000000000N, N = 0, 1...
// and 8 GiB each, all of them peers.
//
// Substitutes for CUDA's handles, in a segment (CudaSegment of src/native/write-job.ts):
// - a memory handle: 64 bytes, the name of a POSIX shared-memory file ("/name", as for shm_open), padded with zeros.
//   The file is mapped read-only; its length is the segment's, and offset 0 its first byte.
// - descriptors of blocks: of files (memfd, shared memory) of at least `blockBytes` each, mapped one after another.
// - a fabric handle: like a memory handle, of at least `blockBytes`.
// - an event handle: 64 bytes, a name as above. The event is done when the first int32 of the file is not 0; nothing is
//   read before. It is opened at the start of the write: a missing file means that the sender has ended.
//
// Process groups of NCCL (native/cuda/group/group.h) use host memory as GPUs. They must open the library of
// native/test/nccl_loop.cc, whose ranks are in this process. Name it in REFIT_NCCL.
//
// Files must not be truncated while a write runs, because that would end the process; write the event's int32 in place.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "core/fault.h"
#include "core/library/device_table.h"
#include "core/pool.h"
#include "cuda/group/group.h"
#include "cuda/group/group_library.h"
#include "cuda/group/group_messages.h"
#include "test/file_driver.h"
#include "test/loop_gpu.h"
#include "transport/ipc/ipc_fetch.h"
#include "transport/ipc/ipc_session.h"

namespace refit {
namespace {

using device_table::guarded;
// One write: this class reads the segments, then the CPU's own write does the rest.
class SharedWrite {
 public:
  SharedWrite(Device& cpu, ipc::Mappings& mappings, const WriteJob& job, Access access)
      : cpu_(cpu),
        job_(job),
        access_(access),
        left_(job.tensors.size()),
        dirty_(job.tensors.size()),
        session_(
            mappings, job, [this](int tensor, std::string message) { fail(tensor, std::move(message)); }, limits()) {
    for (const Rect& rect : job.rects) left_[rect.tensor]++;
  }

  WriteOutcome run(int ranks) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++) threads.emplace_back([this, rank] { read_segments(rank); });
    session_.open();
    for (std::thread& thread : threads) thread.join();
    WriteJob rest = job_;
    std::erase_if(rest.rects,
                  [this](const Rect& rect) { return job_.sources[job_.tensors[rect.tensor].source].segment >= 0; });
    if (out_.error.empty() && !rest.rects.empty()) write(rest);
    session_.close(!out_.error.empty());
    out_.states.resize(left_.size());
    for (size_t t = 0; t < left_.size(); t++) {
      out_.states[t] = static_cast<uint8_t>(left_[t] == 0    ? TensorState::kWritten
                                            : dirty_[t] != 0 ? TensorState::kPartial
                                                             : TensorState::kUntouched);
    }
    out_.segments_opened = session_.opened();
    out_.segments_closed = session_.closed();
    out_.warning = session_.warning();
    return std::move(out_);
  }

 private:
  // Small limits, so a few megabytes behave like many gigabytes.
  static ipc::SessionLimits limits() {
    ipc::SessionLimits out;
    out.batch_bytes = 64 << 10;
    return out;
  }

  void read_segments(int rank) {
    try {
      size_t first = 0, last = 0;
      session_.prepare(rank);
      if (!session_.begin()) return;
      while (session_.next(rank, first, last)) {
        WriteJob part = job_;
        part.rects.clear();
        for (size_t i = first; i < last; i++) {
          const auto& segment = session_.segments(rank)[i];
          for (const size_t index : segment.plan.rects) {
            const Rect& rect = job_.rects[index];
            Source& source = part.sources[job_.tensors[rect.tensor].source];
            source.segment = -1;
            source.data = reinterpret_cast<const uint8_t*>(segment.mapping.base);
            source.bytes = segment.mapping.bytes;
            part.rects.push_back(rect);
          }
        }
        std::sort(part.rects.begin(), part.rects.end(),
                  [](const Rect& a, const Rect& b) { return a.tensor < b.tensor; });
        write(part);
      }
    } catch (const std::exception& e) {
      fail(-1, e.what());
    }
  }

  void write(const WriteJob& part) {
    const std::lock_guard lock(writing_);
    const WriteOutcome wrote = cpu_.write(part, access_);
    std::vector<int> rects(left_.size());
    for (const Rect& rect : part.rects) rects[rect.tensor]++;
    for (size_t t = 0; t < rects.size(); t++) {
      if (rects[t] == 0) continue;
      const auto state = static_cast<TensorState>(wrote.states[t]);
      if (state == TensorState::kWritten) left_[t] -= rects[t];
      if (state != TensorState::kUntouched) dirty_[t] = 1;
    }
    out_.bytes += wrote.bytes;
    if (!wrote.error.empty()) fail(wrote.error_tensor, wrote.error);
  }

  void fail(int tensor, std::string message) {
    {
      const std::lock_guard lock(mutex_);
      if (out_.error.empty()) {
        out_.error = std::move(message);
        out_.error_tensor = tensor;
      }
    }
    session_.stop();
  }

  Device& cpu_;
  const WriteJob& job_;
  const Access access_;
  std::vector<int> left_;       // rectangles of each tensor, under `writing_`
  std::vector<uint8_t> dirty_;  // also under `writing_`
  WriteOutcome out_;
  std::mutex writing_, mutex_;
  ipc::Session session_;
};

// Each rank reads its own GPU's slot.
WriteOutcome write_staged(Device& cpu, const WriteJob& job, int ranks, Access access) {
  WriteOutcome out;
  out.states.assign(job.tensors.size(), static_cast<uint8_t>(TensorState::kWritten));
  std::vector<uint8_t> dirty(job.tensors.size());
  for (int rank = 0; rank < ranks; rank++) {
    WriteJob part = job;
    for (Source& source : part.sources) {
      if (source.rank_data.empty()) continue;
      source.data = source.of(rank);
      source.rank_data.clear();
    }
    std::erase_if(part.rects, [rank](const Rect& rect) { return rect.rank != rank; });
    const WriteOutcome wrote = cpu.write(part, access);
    for (size_t t = 0; t < wrote.states.size(); t++) {
      if (wrote.states[t] != static_cast<uint8_t>(TensorState::kUntouched)) dirty[t] = 1;
      if (wrote.states[t] != static_cast<uint8_t>(TensorState::kWritten)) out.states[t] = 0;
    }
    out.bytes += wrote.bytes;
    if (out.error.empty()) {
      out.error = wrote.error;
      out.error_tensor = wrote.error_tensor;
    }
  }
  for (size_t t = 0; t < dirty.size(); t++) {
    if (out.states[t] == 0 && dirty[t] != 0) out.states[t] = static_cast<uint8_t>(TensorState::kPartial);
  }
  return out;
}

test::LoopGpus& loop_gpus() {
  static auto* const instance = new test::LoopGpus;
  return *instance;
}

class StandIn : public Device {
 public:
  explicit StandIn(const CoreConfig& config)
      : config_(config), pool_(4), driver_(config.ranks), mappings_(driver_, pool_), ranks_(config.ranks) {
    CoreConfig cpu = config;
    cpu.device = "cpu";
    cpu_ = make_cpu_device(cpu);
  }

  DeviceInfo info() const override {
    DeviceInfo out = cpu_->info();
    out.isa = "stand-in for CUDA: " + out.isa;
    return out;
  }
  const void* address(int rank, int param, int set) const override { return cpu_->address(rank, param, set); }
  void begin(const StepBatch& batch) override { cpu_->begin(batch); }
  void collect(StepResult& result) override { cpu_->collect(result); }
  WriteOutcome write(const WriteJob& job, Access access) override {
    for (const Source& source : job.sources) {
      if (!source.rank_data.empty()) return write_staged(*cpu_, job, ranks_, access);
    }
    if (job.segments.empty()) return cpu_->write(job, access);
    const std::lock_guard lock(shared_);  // an operation beside steps may come meanwhile
    return SharedWrite(*cpu_, mappings_, job, access).run(ranks_);
  }
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
            Access access) override {
    cpu_->read(rank, param, row, col, rows, cols, out, access);
  }
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                 Access access) override {
    return cpu_->checksum(rects, tensor_cols, access);
  }
  void scramble(uint64_t seed, int set) override { cpu_->scramble(seed, set); }
  void copy_weights(const std::vector<Rect>& rects, int from, int to) override { cpu_->copy_weights(rects, from, to); }
  uint64_t drop_set(int set) override { return cpu_->drop_set(set); }
  void restore_set(int set) override { cpu_->restore_set(set); }
  uint64_t release_memory(uint32_t tags, bool keep_weights) override {
    if ((tags & kTagWeights) != 0) released_ = true;
    return cpu_->release_memory(tags, keep_weights);
  }
  bool resume_memory(uint32_t tags) override {
    const bool kept = cpu_->resume_memory(tags);
    if ((tags & kTagWeights) != 0) released_ = false;
    return kept;
  }
  uint64_t close_mappings(const std::string& name, Access) override {
    const std::lock_guard lock(shared_);
    return mappings_.close(name);
  }
  void fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) override {
    ipc::await_events(driver_, 0, segment, timeout_ms);
    const ipc::FetchMapping mapping(driver_, 0, segment, offset, bytes);
    std::copy_n(mapping.data(), bytes, out);
  }
  std::unique_ptr<NcclGroup> nccl_group(const NcclGroupOptions& options) override {
    std::vector<std::string> uuids;
    for (int rank = 0; rank < ranks_; rank++)
      uuids.push_back(uuid_of(config_.gpus.empty() ? rank : config_.gpus[rank]));
    cuda::check_group_gpus(uuids, options);
    cuda::GroupHost host;
    host.ranks = ranks_;
    host.open = [](int rank) { return std::make_unique<test::LoopGpu>(rank, loop_gpus()); };
    host.params = [this](int rank, int set) {
      if (released_) throw std::runtime_error("the memory of the weights is released; resume it first");
      std::vector<cuda::GroupSpan> spans;
      for (size_t id = 0; id < config_.params.size(); id++) {
        const Param& param = config_.params[id];
        const uint64_t row_bytes = static_cast<uint64_t>(param.cols) * size_of(param.dtype);
        const uint64_t rows = is_weight(param) ? static_cast<uint64_t>(param.rows) : 0;
        const int home = is_weight(param) ? static_cast<int>(id) : 0;
        spans.push_back({const_cast<void*>(address(rank, home, set)), rows * row_bytes, row_bytes, param.dtype});
      }
      return spans;
    };
    host.lose = [](const std::string&) {};
    return std::make_unique<cuda::GpuGroup>(std::move(host), options);
  }

 private:
  const CoreConfig config_;
  std::unique_ptr<Device> cpu_;
  std::mutex shared_;
  Pool pool_;
  FileDriver driver_;
  ipc::Mappings mappings_;
  const int ranks_;
  std::atomic<bool> released_{false};  // the weights
};

void gpus(Sink<CudaGpus> sink, Failure& failure) noexcept {
  guarded(failure, [&] {
    CudaGpus out;
    const int count = count_gpus();
    if (count == 0) out.error = "the stand-in has no GPUs: REFIT_STAND_IN_CARDS is 0";
    out.driver_cuda = "13.0";
    out.runtime_cuda = "13.0";
    out.driver_version = "0.0";
    out.architectures = "stand-in";
    for (int i = 0; i < count; i++) {
      const std::string bus = "0000:0" + std::to_string(i + 1) + ":00.0";
      out.gpus.push_back(
          {i, "stand-in", uuid_of(i), bus, "9.0", 1, uint64_t{8} << 30, uint64_t{8} << 30, true, false, ""});
    }
    out.peer_access.assign(static_cast<size_t>(count) * count, 1);
    sink.take(sink.context, out);
  });
}

void memory_plan(const CoreConfig& config, CudaMemoryPlan& plan, Failure& failure) noexcept {
  guarded(failure, [&] {
    for (const Param& param : config.params)
      plan.weight_bytes += static_cast<uint64_t>(param.rows * param.cols) * size_of(param.dtype);
    const uint64_t kv_heads = std::max(1, config.recipe.kv_heads / std::max(1, config.ranks));
    plan.kv_bytes = static_cast<uint64_t>(config.pages) * config.page_size * 2 * kv_heads * config.recipe.head_dim *
                    config.recipe.layers * size_of(config.dtype);
    plan.scratch_bytes = 16 << 20;
    plan.fixed_bytes = 16 << 20;
  });
}

Device* open(const CoreConfig& config, Failure& failure) noexcept {
  Device* device = nullptr;
  guarded(failure, [&] { device = new StandIn(config); });
  return device;
}

void unique_id(const std::string& library, uint8_t* id, Failure& failure) noexcept {
  guarded(failure, [&] {
    const std::vector<uint8_t> bytes = cuda::nccl_group_id(library);
    std::copy(bytes.begin(), bytes.end(), id);
  });
}

constexpr DeviceLibrary kTable = device_table::make(gpus, memory_plan, open, unique_id);

}  // namespace
}  // namespace refit

extern "C" __attribute__((visibility("default"))) const refit::DeviceLibrary* refit_device_library() {
  return &refit::kTable;
}

#ifdef REFIT_FAULTS
extern "C" __attribute__((visibility("default"))) void refit_arm_fault(refit::fault::Point point, int64_t at,
                                                                       refit::fault::Action action, int stall_ms) {
  refit::fault::arm(point, at, action, stall_ms);
}
#endif
