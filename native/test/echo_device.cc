// A shared library with a device that computes nothing. It returns its arguments, so a test can check that all of
// them cross the boundary between addon and library. It can also fail in every possible way. Built by
// test/native/cuda-library.test.ts.
#include <deque>
#include <numeric>
#include <string>

#include "core/library/device_table.h"

namespace refit {
namespace {

using device_table::guarded;

[[noreturn]] void fail(uint64_t how) {
  if (how == 1) throw DeviceLost("rank 1 (GPU-1, GPU 1) is lost");
  if (how == 2) throw NoMemory("GPU 0 is full");
  if (how == 3) throw std::bad_alloc();
  if (how == 4) throw std::invalid_argument("malformed");
  if (how == 5) throw std::runtime_error(std::string(20000, 'x'));
  throw 6;
}

class EchoDevice : public Device {
 public:
  explicit EchoDevice(const CoreConfig& config) : config_(config) {}

  DeviceInfo info() const override {
    std::string gpus;
    for (const int gpu : config_.gpus) gpus += " " + std::to_string(gpu);
    return {"GPUs" + gpus + (config_.share_gpus ? " shared" : "") + (config_.record_experts ? " experts" : "") +
                (config_.graphs ? "" : " eager") + " watchdog " + std::to_string(config_.watchdog_seconds),
            config_.threads, static_cast<uint64_t>(config_.max_step_tokens),
            static_cast<uint64_t>(config_.max_step_sequences) * 1000000 + config_.max_context};
  }
  const void* address(int rank, int param, int) const override {
    return reinterpret_cast<const void*>(static_cast<uintptr_t>(rank * 1000 + param));
  }
  void begin(const StepBatch& batch) override {
    StepResult result;
    if (batch.rows() == 0) fail(static_cast<uint64_t>(batch.tokens[0]));
    result.tokens.assign(batch.tokens.begin(), batch.tokens.end());
    result.logprobs.assign(batch.row_floats.begin(), batch.row_floats.end());
    result.top_ids.assign(batch.pages.begin(), batch.pages.end());
    result.top_logprobs.assign(batch.bias_values.begin(), batch.bias_values.end());
    for (const uint64_t seed : batch.row_seeds) result.id_logprobs.push_back(static_cast<float>(seed));
    if (config_.record_experts) result.experts = {7, 65535};
    results_.push_back(std::move(result));
  }
  void collect(StepResult& result) override {
    result = std::move(results_.front());
    results_.pop_front();
  }
  WriteOutcome write(const WriteJob& job, Access) override {
    WriteOutcome out;
    for (const Tensor& tensor : job.tensors) {
      out.states.push_back(static_cast<uint8_t>(tensor.dtype));
      out.bytes += tensor.row_bytes;
    }
    for (const Source& source : job.sources) out.bytes += source.data == nullptr ? 0 : source.data[0];
    out.error = std::to_string(job.rects.size()) + " rectangles";
    for (const Segment& segment : job.segments) {
      out.error += ", " + segment.uuid + " " + segment.keep + " " + std::to_string(segment.handle.size()) + " " +
                   std::to_string(segment.block_bytes) + " " + std::to_string(segment.fds.size()) + " " +
                   std::to_string(segment.fabric.size()) + " " + std::to_string(segment.events.size());
    }
    out.segments_opened = job.segments.size();
    out.segments_closed = static_cast<uint64_t>(job.event_timeout_ms);
    out.warning = job.segments.empty() ? "" : "left open";
    out.error_tensor = job.rects.back().tensor;
    return out;
  }
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out, Access) override {
    std::iota(out, out + rows * cols * 2, static_cast<uint8_t>(rank * 100 + param * 10 + row + col));
  }
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                 Access) override {
    std::vector<uint64_t> out;
    for (const Rect& rect : rects) {
      out.push_back((uint64_t{1} << 63) + static_cast<uint64_t>(rect.rank * 1000 + tensor_cols[rect.tensor]));
    }
    return out;
  }
  void scramble(uint64_t seed, int) override { fail(seed); }
  uint64_t release_memory(uint32_t tags, bool keep_weights) override {
    if (tags == 0) fail(2);
    return (uint64_t{1} << 40) + tags * 10 + keep_weights;
  }
  bool resume_memory(uint32_t tags) override { return tags == kTagWeights; }
  void fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) override {
    std::iota(out, out + bytes,
              static_cast<uint8_t>(offset + segment.handle.size() + static_cast<uint64_t>(timeout_ms)));
  }
  uint64_t close_mappings(const std::string& name, Access) override { return (uint64_t{1} << 40) + name.size(); }

 private:
  const CoreConfig config_;
  std::deque<StepResult> results_;
};

void gpus(Sink<CudaGpus> sink, Failure& failure) noexcept {
  guarded(failure, [&] {
    CudaGpus out;
    out.driver_cuda = "13.0";
    out.runtime_cuda = "13.1";
    out.driver_version = "580.1.2";
    out.architectures = "90";
    out.gpus.push_back({0, "first", "GPU-0", "0000:01:00.0", "9.0", 132, uint64_t{80} << 30, 5, true, false, ""});
    out.gpus.push_back({1, "second", "GPU-1", "0000:02:00.0", "7.5", 40, 7, 6, false, true, "too old"});
    out.peer_access = {1, 0, 1, 1};
    out.libraries.push_back({"cuBLASLt", "/a/libcublasLt.so.13", "13.1.0", ""});
    out.libraries.push_back({"NCCL", "", "", "libnccl.so.2: not there"});
    sink.take(sink.context, out);
  });
}

void memory_plan(const CoreConfig& config, CudaMemoryPlan& plan, Failure& failure) noexcept {
  guarded(failure, [&] {
    if (config.dtype == DType::kFloat32) fail(4);
    plan = {uint64_t{1} << 40, 5, static_cast<uint64_t>(config.pages), 3, 4};
  });
}

Device* open(const CoreConfig& config, Failure& failure) noexcept {
  Device* device = nullptr;
  guarded(failure, [&] {
    if (config.pages <= 6) fail(static_cast<uint64_t>(config.pages));
    device = new EchoDevice(config);
  });
  return device;
}

constexpr DeviceLibrary kTable = device_table::make(gpus, memory_plan, open);

}  // namespace
}  // namespace refit

extern "C" __attribute__((visibility("default"))) const refit::DeviceLibrary* refit_device_library() {
  static const refit::DeviceLibrary table = [] {
    refit::DeviceLibrary out = refit::kTable;
#ifdef OTHER_VERSION
    out.version++;
#endif
#ifdef OTHER_LAYOUT
    out.layout++;
#endif
    return out;
  }();
  return &table;
}
