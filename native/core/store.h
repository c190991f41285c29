// The parameters of all ranks: fused, sharded, zeroed at the start, at fixed addresses. The only writer of weights.
// There may be two sets of weights (CoreConfig::sets), each at addresses of its own; the slots of adapters exist once.
//
// Threads: one caller at a time for each set, which passes in the pool that does the work. While memory is released,
// only `resume` and `restore` may touch it; the device ensures this.
#pragma once
#include <array>
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

  // Gives the memory of all parameters that have memory back to the system; addresses stay. With `keep` the bytes are
  // copied into other memory first; std::bad_alloc then changes nothing. Returns the number of bytes given back.
  uint64_t release(bool keep, Pool& pool);
  // Backs them with memory again. The contents are the kept bytes, or zeros. Returns true if the bytes were kept. If it
  // throws std::bad_alloc, the memory stays released.
  bool resume(Pool& pool);
  bool released() const { return released_; }
  // The same for the weights of one set alone, whose bytes are not kept; `release` and `resume` leave it out meanwhile.
  uint64_t drop(int set);
  void restore(int set, Pool& pool);
  bool dropped(int set) const { return dropped_[set]; }

  int ranks() const { return ranks_; }
  int sets() const { return sets_; }
  int params() const { return static_cast<int>(shapes_.size()); }
  const Param& shape(int param) const { return shapes_[param]; }
  // Row-major [shape.rows, shape.cols], aligned to 64 bytes, fixed for life.
  void* param(int rank, int param, int set = 0) { return address(rank, param, set); }
  const void* param(int rank, int param, int set = 0) const { return address(rank, param, set); }
  // Bytes of all ranks with alignment, also while released: of one set of weights with the slots of adapters, and of
  // each further set.
  uint64_t bytes() const;
  uint64_t set_bytes() const;

  // The job must have passed check_write (core/write/write_check.h). Reads every needed byte of a source once for all
  // ranks. Never throws for a fault during the write: the outcome reports the state of each tensor.
  WriteOutcome write(const WriteJob& job, Pool& pool, int set = 0);
  // Row-major stored bytes of [row, row + rows) x [col, col + cols).
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out, int set = 0) const;
  // Copies the rectangles' targets of one set to the same places of another. Throws std::runtime_error for an injected
  // fault, with some of them copied.
  void copy(const std::vector<Rect>& rects, int from, int to, Pool& pool);
  // The partial checksum (docs/checksum.md) of each rectangle.
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols, Pool& pool,
                                 int set = 0) const;
  // Finite noise in [-1, 1] that depends on seed, rank, parameter and position, in all weights of a set; adapters stay.
  void scramble(uint64_t seed, Pool& pool, int set = 0);

 private:
  uint8_t* address(int rank, int param, int set) const {
    return addresses_[(static_cast<size_t>(set) * ranks_ + rank) * shapes_.size() + param];
  }
  // The arenas that `release` and `resume` are about.
  std::vector<Arena*> present();

  const std::vector<Param> shapes_;
  const int ranks_, sets_;
  std::vector<Arena> weights_;       // set-major, one per rank
  std::vector<Arena> adapters_;      // one per rank
  std::vector<uint8_t*> addresses_;  // set-major, then rank-major; adapters are the same in each set
  bool released_ = false;
  std::array<bool, kMostSets> dropped_{};
  std::vector<Arena> kept_;  // while released: a copy of each arena, or nothing
};

}  // namespace refit
