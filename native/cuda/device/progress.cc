#include "cuda/device/progress.h"

#include "cuda/device/driver.h"
#include "cuda/device/environment.h"

namespace refit::cuda {
namespace {

std::string full_name(const char* name, int layer) {
  return layer < 0 ? std::string(name) : "layers." + std::to_string(layer) + "." + name;
}

}  // namespace

Progress::Progress(int rank, cudaStream_t stream)
    : stream_(stream),
      sync_(switched_on("REFIT_CUDA_SYNC")),
      fault_(fault_from_environment()),
      ops_(std::make_unique<Op[]>(kOps)) {
  if (fault_.rank != rank) fault_.kind = Fault::Kind::kNone;
  void* word = nullptr;
  check(cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  word_ = static_cast<uint32_t*>(word);
  *word_ = 0;
  void* on_gpu = nullptr;
  check(cudaHostGetDevicePointer(&on_gpu, word, 0), "cudaHostGetDevicePointer");
  word_on_gpu_ = reinterpret_cast<uint64_t>(on_gpu);
}

Progress::~Progress() { cudaFreeHost(const_cast<uint32_t*>(word_)); }

void Progress::begin_step() {
  fresh_step_ = true;
  if (fault_.step > 0) fault_.step--;
  inject_ = fault_.kind != Fault::Kind::kNone && fault_.step == 0;
}

void Progress::begin_op(const char* name, int layer) {
  if (muted_) return;
  const uint32_t number = issued_.load(std::memory_order_relaxed);
  const Op& last = ops_[(number - 1) % kOps];
  if (sync_ && !fresh_step_) {
    const cudaError_t code = cudaStreamSynchronize(stream_);
    if (code != cudaSuccess) throw CudaError(code, full_name(last.name, last.layer));
  }
  const bool boundary = fresh_step_ || sync_ || last.layer.load(std::memory_order_relaxed) != layer;
  fresh_step_ = false;
  Op& op = ops_[number % kOps];
  op.name.store(name, std::memory_order_relaxed);
  op.layer.store(layer, std::memory_order_relaxed);
  op.boundary.store(boundary, std::memory_order_relaxed);
  issued_.store(number + 1, std::memory_order_release);
  // The stream writes the word after everything that was launched before.
  if (boundary) check(driver().stream_write(stream_, word_on_gpu_, number, CU_STREAM_WRITE_VALUE_DEFAULT), "progress");
  if (inject_ && layer >= 0) {
    inject_ = false;
    launch_fault(fault_.kind, stream_);
    fault_.kind = Fault::Kind::kNone;
  }
}

void Progress::end_step() { ended_.store(issued_.load(std::memory_order_relaxed), std::memory_order_release); }

std::string Progress::where() const {
  const uint32_t issued = issued_.load(std::memory_order_acquire);
  const uint32_t ended = ended_.load(std::memory_order_acquire);
  if (issued == ended) return "";
  // All operations before `first` have ended. A word from an earlier step does not describe this one.
  uint32_t first = *word_;
  if (first - ended >= issued - ended) first = ended;  // both are counted from `ended`, so wrapping does not matter
  if (issued - first > kOps) return "";
  uint32_t last = issued - 1;
  for (uint32_t n = first + 1; n != issued; n++) {
    if (!ops_[n % kOps].boundary.load(std::memory_order_relaxed)) continue;
    last = n - 1;  // the stream has not written the boundary before this one
    break;
  }
  const auto name = [this](uint32_t n) {
    const Op& op = ops_[n % kOps];
    return full_name(op.name.load(std::memory_order_relaxed), op.layer.load(std::memory_order_relaxed));
  };
  return first == last ? name(first) : "between " + name(first) + " and " + name(last);
}

}  // namespace refit::cuda
