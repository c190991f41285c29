// One anonymous mapping that is carved from the front and never moves: parameters live here for the life of a core.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/pool.h"

namespace refit {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;

  Arena() = default;
  // Zeroed pages, huge ones where the system gives them. Throws std::bad_alloc.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The next `bytes`, aligned to kAlignment. Throws std::bad_alloc when the arena is full.
  void* carve(size_t bytes);

  // Backs the whole arena with memory now, on all threads of the pool. Throws std::bad_alloc when there is not enough.
  void populate(Pool& pool);

  // Gives the memory behind it back to the system; addresses stay, contents are zero from then on. Returns the bytes
  // that were in memory.
  size_t release();
  // `populate` after `release`: all of it or nothing. Throws std::bad_alloc.
  void resume(Pool& pool);

  uint8_t* data() const { return data_; }
  size_t used() const { return used_; }
  // Reserved, including what is not carved yet.
  size_t bytes() const { return bytes_; }

  // The most bytes that `carve(bytes)` takes from the arena.
  static constexpr size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
};

// Gives the memory behind an anonymous private mapping back to the system; the range stays mapped and reads as zeros.
// Returns the bytes that were in memory.
size_t drop_memory(uint8_t* data, size_t bytes);

}  // namespace refit
