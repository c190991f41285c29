// The parts of a GPU that one rank of a process group uses: a thread, a stream and some memory of its own. So a
// broadcast can be received while the rank's other thread scatters the one before. It is an interface, so tests of
// groups need no GPU.
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
  // Marks in a set, and number of sets: one set for each operation that may be pending at a time.
  static constexpr int kMarks = 64;
  static constexpr int kMarkSets = 3;

  virtual ~GroupGpu() = default;

  // "rank 1 (GPU-…, GPU 1)", with the tensor-parallel rank. Any thread.
  virtual std::string label() const = 0;
  // The current operation of the thread. Any thread.
  virtual const char* last_operation() const = 0;
  // Runs fn on the GPU's thread. Exceptions come out of the future, as DeviceLost if the GPU is lost. Any thread.
  virtual std::future<void> run(std::function<void()> fn) = 0;

  // --- on the GPU's thread; all except `doing` and `free` throw std::exception (CudaError).

  // `operation`: a string literal.
  virtual void doing(const char* operation) noexcept = 0;
  virtual NcclStream stream() = 0;
  // Throws NoMemory.
  virtual uint8_t* allocate(uint64_t bytes) = 0;
  virtual void free(uint8_t* memory) noexcept = 0;
  // Enqueues a copy from host memory.
  virtual void upload(uint8_t* to, const uint8_t* from, uint64_t bytes) = 0;
  // Copies to host memory, behind all work on the stream, and returns when the bytes are there.
  virtual void download(uint8_t* to, const uint8_t* from, uint64_t bytes) = 0;
  // Whether the stream has passed all its work.
  virtual bool idle() = 0;
  // mark() enqueues mark number `index` of a set (rising from 0, below kMarks); passed() checks whether the stream has
  // passed it.
  virtual void mark(int set, int index) = 0;
  virtual bool passed(int set, int index) = 0;
};

// Memory of one parameter, or of several adjacent ones.
struct GroupSpan {
  void* data = nullptr;
  uint64_t bytes = 0;
  uint64_t row_bytes = 0;  // row size of a parameter
  DType dtype = DType::kBFloat16;
};

// The functions of a device that a group of its ranks needs. All may throw.
struct GroupHost {
  int ranks = 0;  // number of tensor-parallel ranks
  // Creates a GroupGpu for the rank; not on the GPU's thread.
  std::function<std::unique_ptr<GroupGpu>(int rank)> open;
  // The memory of the rank's parameters in a set of weights, in order; 0 bytes for slots of adapters, which no
  // broadcast reaches. Throws std::runtime_error while it is released.
  std::function<std::vector<GroupSpan>(int rank, int set)> params;
  // A GPU is lost, or a thread is stuck in it: the process must end.
  std::function<void(const std::string& message)> lose;
};

}  // namespace refit::cuda
