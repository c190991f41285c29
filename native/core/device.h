// A device: the ranks of one engine with their parameters, KV pages and forward pass. There is one for the CPU and one
// for CUDA. The binding and everything above it use only this interface.
//
// Threads: `begin` and `collect` are called by the scheduler's thread. `write`, `read`, `checksum` and `scramble` are
// called by the core's writer thread while the scheduler is stopped between two steps (the gate). The two never
// overlap. A second thread calls `write`, `read` and `checksum` with Access::beside, and the operations on a spare set
// of weights, while steps and operations of the first thread go on.
//
// Sets: with CoreConfig::sets = 2 all weights are in memory twice, each set at addresses of its own. A step computes
// with the set that its batch names; the caller knows which set that is, and writes the other one meanwhile. The slots
// of adapters exist once.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/model.h"
#include "core/step.h"
#include "core/write/write.h"
#include "transport/nccl/nccl_group.h"

namespace refit {

// Kinds of memory that can be released separately; the names are SGLang's.
enum MemoryTag : uint32_t { kTagWeights = 1, kTagKvCache = 2, kTagCudaGraph = 4 };

// How an operation reaches parameters. `beside`: beside steps and gated operations, on threads and streams of its own.
// The caller makes sure that nothing else uses the bytes meanwhile and that their memory is not released.
struct Access {
  bool beside = false;
  int set = 0;
};

struct DeviceInfo {
  std::string isa;
  int threads = 0;
  uint64_t weight_bytes = 0;  // of one set of weights, with the slots of adapters
  uint64_t kv_bytes = 0;
  uint64_t spare_bytes = 0;  // of the other set, if there is one
};

// The device can no longer compute (a sticky CUDA error, a rank that is stuck): the process must end. The message names
// the rank, its GPU and its current operation.
struct DeviceLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;
  // Fixed for the life of the device.
  virtual const void* address(int rank, int param, int set) const = 0;
  const void* address(int rank, int param) const { return address(rank, param, 0); }
  // Begins a step, which runs after the one before; at most kMostBegun have begun and are not collected. The batch may
  // change when this returns. Its tokens may be those of the step before (is_fed). A malformed batch throws
  // std::invalid_argument here or from `collect`.
  virtual void begin(const StepBatch& batch) = 0;
  // Waits for the first step that has begun and is not collected, and takes its result or throws its failure. A step
  // that takes tokens of a failed one fails too.
  virtual void collect(StepResult& result) = 0;
  void step(const StepBatch& batch, StepResult& result) {
    begin(batch);
    collect(result);
  }
  // The job's bounds have been checked. Never throws for an I/O fault: the outcome reports it.
  virtual WriteOutcome write(const WriteJob& job, Access access) = 0;
  WriteOutcome write(const WriteJob& job) { return write(job, Access{}); }
  // Row-major stored bytes of [row, row + rows) x [col, col + cols).
  virtual void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
                    Access access) = 0;
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) {
    read(rank, param, row, col, rows, cols, out, Access{});
  }
  // Partial checksum of each rectangle; tensor_cols[rect.tensor] gives the checkpoint tensor's columns.
  virtual std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                         Access access) = 0;
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols) {
    return checksum(rects, tensor_cols, Access{});
  }
  // The weights of one set.
  virtual void scramble(uint64_t seed, int set) = 0;
  void scramble(uint64_t seed) { scramble(seed, 0); }
  // Beside steps: copies the rectangles' targets (rank, param, dst_row, dst_col, rows, cols) of one set to the same
  // places of another. A failure leaves the other set in part as it was. The device must have both sets.
  virtual void copy_weights(const std::vector<Rect>&, int /* from */, int /* to */) { throw one_set(); }
  // Beside steps: gives the memory of a set that no step uses back to the system (returns the bytes), or backs it
  // with memory again, with undefined contents (std::bad_alloc: it stays without). Addresses stay. `release_memory` and
  // `resume_memory` leave such a set alone.
  virtual uint64_t drop_set(int /* set */) { throw one_set(); }
  virtual void restore_set(int /* set */) { throw one_set(); }
  // Gives physical memory of the tags (MemoryTag bits) back to the system; addresses stay. With `keep_weights` the
  // bytes of weights are kept in host memory first (std::bad_alloc changes nothing). Tags that are released already are
  // left alone. Returns the bytes given back.
  virtual uint64_t release_memory(uint32_t tags, bool keep_weights) = 0;
  // Backs the tags with memory again: kept weights have their bytes, other contents are undefined. Throws
  // std::bad_alloc; a tag without enough memory stays released. Returns true if the weights have their bytes.
  virtual bool resume_memory(uint32_t tags) = 0;
  // Closes the segments that writes with this access keep open under the name, on every rank. Returns the number of
  // mappings. Called as `write` is.
  virtual uint64_t close_mappings(const std::string&, Access) { return 0; }
  // Copies bytes [offset, offset + bytes) of a segment to host memory when its events are done. Opens and closes the
  // segment. Called by the writer thread, as `write` is. Throws std::runtime_error with advice.
  virtual void fetch(const Segment&, uint64_t, uint64_t, int /* timeout_ms */, uint8_t*) {
    throw std::runtime_error("it lies in the memory of a GPU, and this engine is on the CPU");
  }
  // Creates a process group of this device's ranks. Any thread may call it. The device must outlive the group. Throws
  // GroupError (kRefused).
  virtual std::unique_ptr<NcclGroup> nccl_group(const NcclGroupOptions&) {
    throw GroupError(GroupErrorKind::kRefused,
                     "NCCL connects GPUs, and this engine runs on the CPU: use backend \"gloo\"");
  }

 private:
  static std::logic_error one_set() { return std::logic_error("this device holds one set of weights"); }
};

// Throws std::invalid_argument (bad configuration) or std::bad_alloc.
std::unique_ptr<Device> make_cpu_device(const CoreConfig& config);

}  // namespace refit
