// What one rank of a process group needs of its GPU: a thread, a stream and some memory of its own, so that a
// broadcast can be received while the rank's other thread scatters what came before. An interface, so that groups are
// tested on machines without a GPU.
#pragma once
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cuda/group/nccl_api.h"

namespace refit::cuda {

class GroupGpu {
 public:
  // Marks of a set, and sets: one for each thing that may be under way at a time.
  static constexpr int kMarks = 64;
  static constexpr int kMarkSets = 3;

  virtual ~GroupGpu() = default;

  // "rank 1 (GPU-…, GPU 1)": the tensor-parallel rank. Any thread.
  virtual std::string label() const = 0;
  // What the thread is doing; any thread.
  virtual const char* last_operation() const = 0;
  // Runs fn on the GPU's thread; exceptions come out of the future, as DeviceLost where the GPU is lost. Any thread.
  virtual std::future<void> run(std::function<void()> fn) = 0;

  // --- on the GPU's thread; all but `doing` and `free` throw std::exception (CudaError).

  // A string literal.
  virtual void doing(const char* operation) noexcept = 0;
  virtual NcclStream stream() = 0;
  // Throws NoMemory.
  virtual uint8_t* allocate(uint64_t bytes) = 0;
  virtual void free(uint8_t* memory) noexcept = 0;
  // Enqueues a copy from host memory.
  virtual void upload(uint8_t* to, const uint8_t* from, uint64_t bytes) = 0;
  // The same the other way; returns when it is there. Behind all that the stream was given.
  virtual void download(uint8_t* to, const uint8_t* from, uint64_t bytes) = 0;
  // Whether the stream has passed all that it was given.
  virtual bool idle() = 0;
  // Enqueues mark number `index` of a set (rising from 0, below kMarks); whether the stream has passed it.
  virtual void mark(int set, int index) = 0;
  virtual bool passed(int set, int index) = 0;
};

// Memory of one parameter, or of several that lie one behind the other.
struct GroupSpan {
  void* data = nullptr;
  uint64_t bytes = 0;
  uint64_t row_bytes = 0;  // of a parameter
};

// What a group needs of the device that its ranks belong to. All may throw.
struct GroupHost {
  int ranks = 0;                   // tensor-parallel
  DType dtype = DType::kBFloat16;  // of parameters
  // A GroupGpu for the rank; not on the GPU's thread.
  std::function<std::unique_ptr<GroupGpu>(int rank)> open;
  // Where the rank's parameters are, in order; throws std::runtime_error while their memory is released.
  std::function<std::vector<GroupSpan>(int rank)> params;
  // A GPU is lost, or a thread is stuck in it: the process is to end.
  std::function<void(const std::string& message)> lose;
};

}  // namespace refit::cuda
