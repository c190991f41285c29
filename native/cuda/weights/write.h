// Weights on GPUs: writes, reads, sums and scrambles the parameters of all ranks. It owns no parameter.
//
// Bytes of files and of pageable memory travel through a ring of pinned slots: threads read each byte once for all
// ranks into a slot, while every rank copies earlier slots to its own GPU. The scatter kernel takes bytes that must be
// converted or re-strided out of the slot. Sources on GPUs and in pinned memory are scattered where they lie. Memory of
// other processes is, too: it is opened for the write (transport/ipc/ipc_session.h).
//
// Threads: one caller at a time (the core's writer thread, or its thread for operations beside steps, which has a store
// and ranks of its own), which reads together with the reader pool; the ranks' threads make the CUDA calls. No step may
// use the weights that it writes. Every call ends with all ranks synchronised.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/model.h"
#include "core/write/write.h"
#include "cuda/device/rank.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// The memory of one set of parameters: row-major, `shapes` per rank. It must outlive its users. They are Elements,
// except for a few small ones in float32 (the table of adapters), which count as rows of twice as many elements of 2
// bytes.
struct GpuParams {
  std::vector<std::unique_ptr<Rank>>* ranks = nullptr;
  std::vector<Param> shapes;
  std::vector<Element*> addresses;  // rank-major: [rank * shapes.size() + param]

  // Elements of 2 bytes in one element of the parameter.
  int64_t halves(int param) const { return static_cast<int64_t>(size_of(shapes[param].dtype) / sizeof(Element)); }
  Element* at(int rank, int param) const { return addresses[static_cast<size_t>(rank) * shapes.size() + param]; }
};

class GpuStore {
 public:
  // Bytes of pinned host memory that reach the rate of a GPU's link.
  static constexpr uint64_t kRingBytes = 256 << 20;

  // `sets`: the parameters by set, with the same ranks and shapes. `rate`: the most bytes that a write or a copy of
  // weights moves in a second on each GPU, so that steps beside it keep their pace; 0: as many as it can. Allocates the
  // ring, which lives as long as the store, and every rank's tables; `threads` read files. Throws CudaError,
  // std::bad_alloc.
  GpuStore(std::vector<GpuParams> sets, int threads, uint64_t ring_bytes = kRingBytes, double rate = 0);
  ~GpuStore();
  GpuStore(const GpuStore&) = delete;
  GpuStore& operator=(const GpuStore&) = delete;

  // The job must have passed check_write; addresses of GPU sources are readable from every rank's GPU. The outcome
  // reports faults of sources and GPU errors that the GPU survives, tensor by tensor; a tensor counts as written only
  // when every rank has synchronised without an error. Throws CudaError if a GPU is lost (sticky error).
  WriteOutcome write(const WriteJob& job, int set = 0);

  // Closes the segments that writes kept open under the name; returns the number of closed mappings.
  uint64_t close_mappings(const std::string& name);

  // See Device::fetch.
  void fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out);

  // All functions below throw CudaError if the GPU is lost; such an error changes nothing in the weights.
  // Row-major stored bytes of [row, row + rows) x [col, col + cols).
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out, int set = 0);
  // The partial checksum (docs/checksum.md) of each rectangle.
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols, int set = 0);
  // The noise of Store::scramble, equal bit for bit. Slots of adapters stay as they are.
  void scramble(uint64_t seed, int set = 0);

  // See Device::copy_weights. Throws CudaError; std::runtime_error for an injected fault.
  void copy(const std::vector<Rect>& rects, int from, int to);

 private:
  uint64_t checksum_on_host(const Rect& rect, const std::vector<int64_t>& tensor_cols, int set);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace refit::cuda
