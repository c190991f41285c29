// The parameters of all ranks: fused, sharded, zeroed at the start, at fixed addresses. The only writer of weights.
//
// Threads: one caller at a time, which passes in the pool that does the work. While the memory is released, only
// `resume` may touch it; the device ensures this.
#pragma once
#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/model.h"
#include "core/pool.h"
#include "core/write/write.h"

namespace refit {

class Store {
 public:
  // Allocates every parameter of every rank (config.ranks x config.params).
  // Throws std::bad_alloc; std::invalid_argument for a size that is negative or overflows.
  explicit Store(const CoreConfig& config);
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Backs everything with memory. A lack of memory then fails here and not in the middle of a write, and the first load
  // does not wait for page faults. Throws std::bad_alloc.
  void populate(Pool& pool);

  // Gives the memory of all parameters back to the system; addresses stay. With `keep` the bytes are copied into other
  // memory first; std::bad_alloc then changes nothing. Returns the number of bytes given back.
  uint64_t release(bool keep, Pool& pool);
  // Backs everything with memory again. The contents are the kept bytes, or zeros. Returns true if the bytes were kept.
  // If it throws std::bad_alloc, the memory stays released.
  bool resume(Pool& pool);
  bool released() const { return released_; }

  int ranks() const { return static_cast<int>(arenas_.size()); }
  int params() const { return static_cast<int>(shapes_.size()); }
  const Param& shape(int param) const { return shapes_[param]; }
  // Row-major [shape.rows, shape.cols], aligned to 64 bytes, fixed for life.
  void* param(int rank, int param) { return addresses_[address_index(rank, param)]; }
  const void* param(int rank, int param) const { return addresses_[address_index(rank, param)]; }
  // Bytes of all ranks with alignment, also while released.
  uint64_t bytes() const;

  // The job must have passed check_write (core/write/write_check.h). Reads every needed byte of a source once for all
  // ranks. Never throws for a fault during the write: the outcome reports the state of each tensor.
  WriteOutcome write(const WriteJob& job, Pool& pool);
  // Row-major stored bytes of [row, row + rows) x [col, col + cols).
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) const;
  // The partial checksum (docs/checksum.md) of each rectangle.
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                 Pool& pool) const;
  // Finite noise in [-1, 1] that depends on seed, rank, parameter and position, in all weights; adapters stay.
  void scramble(uint64_t seed, Pool& pool);

 private:
  size_t address_index(int rank, int param) const { return static_cast<size_t>(rank) * shapes_.size() + param; }

  std::vector<Param> shapes_;
  std::vector<Arena> arenas_;        // one per rank
  std::vector<uint8_t*> addresses_;  // rank-major
  bool released_ = false;
  std::vector<Arena> kept_;  // while released: a copy of each arena, or nothing
};

}  // namespace refit
