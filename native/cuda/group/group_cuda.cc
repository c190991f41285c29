#include "cuda/group/group_cuda.h"

#include <vector>

#include "core/memory_error.h"
#include "cuda/device/check.h"
#include "cuda/device/memory.h"
#include "cuda/device/rank.h"

namespace refit::cuda {
namespace {

class CudaGroupGpu : public GroupGpu {
 public:
  // It has a Health of its own: the group, not the watchdog, decides how long a rank may wait for others.
  CudaGroupGpu(int rank, int device) : rank_(rank, device) {
    rank_
        .run([this] {
          for (auto& set : marks_) {
            for (cudaEvent_t& event : set) {
              check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
            }
          }
        })
        .get();
  }
  ~CudaGroupGpu() override {
    try {
      rank_
          .run([this] {
            for (auto& set : marks_) {
              for (cudaEvent_t event : set) cudaEventDestroy(event);
            }
          })
          .get();
    } catch (...) {
      // The GPU is lost, and the process is about to end.
    }
  }

  std::string label() const override { return rank_.label(); }
  const char* last_operation() const override { return rank_.last_operation(); }
  std::future<void> run(std::function<void()> fn) override { return rank_.run(std::move(fn)); }
  void doing(const char* operation) noexcept override { rank_.doing(operation); }
  NcclStream stream() override { return rank_.stream; }

  uint8_t* allocate(uint64_t bytes) override {
    void* memory = nullptr;
    const cudaError_t code = cudaMalloc(&memory, bytes);
    if (code == cudaSuccess) return static_cast<uint8_t*>(memory);
    cudaGetLastError();
    if (code != cudaErrorMemoryAllocation) throw CudaError(code, "memory for a process group");
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw NoMemory(label() + " has no room for " + gigabytes(bytes) +
                   " of a process group's staging: " + gigabytes(free) + " of " + gigabytes(total) + " are free");
  }
  void free(uint8_t* memory) noexcept override { cudaFree(memory); }

  void upload(uint8_t* to, const uint8_t* from, uint64_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, rank_.stream), "upload");
  }

  void download(uint8_t* to, const uint8_t* from, uint64_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, rank_.stream), "download");
    check(cudaStreamSynchronize(rank_.stream), "download");
  }

  bool idle() override { return is_done(cudaStreamQuery(rank_.stream), "a process group's stream"); }

  void mark(int set, int index) override {
    check(cudaEventRecord(marks_[set][index], rank_.stream), "cudaEventRecord");
  }
  bool passed(int set, int index) override {
    return is_done(cudaEventQuery(marks_[set][index]), "a mark of a process group");
  }

 private:
  static bool is_done(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return true;
    cudaGetLastError();  // a later launch would report this "not ready", too
    if (code != cudaErrorNotReady) throw CudaError(code, what);
    return false;
  }

  Rank rank_;
  cudaEvent_t marks_[kMarkSets][kMarks] = {};
};

}  // namespace

std::unique_ptr<GroupGpu> open_group_gpu(int rank, int device) { return std::make_unique<CudaGroupGpu>(rank, device); }

}  // namespace refit::cuda
