// GPU memory by tag: an address range that is reserved once and never moves, and physical memory behind it that is
// released and resumed (CUDA virtual memory management). Every GPU of the engine can read and write it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace refit::cuda {

class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  // Size of a piece of physical memory. Large pieces keep the number of calls low; the last piece is smaller.
  static constexpr size_t kChunk = size_t{256} << 20;

  Arena() = default;
  // Reserves `bytes` on GPU `device` (runtime ordinal), maps them for all GPUs in `peers` and puts memory behind them.
  // Throws NoMemory (with the GPU's free memory) when the GPU is full; throws CudaError.
  Arena(int device, size_t bytes, const std::vector<int>& peers);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Bytes of physical memory behind an arena of `bytes`, for GPUs that map in pieces of 2 MiB (all known GPUs do).
  static constexpr size_t footprint(size_t bytes) { return (bytes + (size_t{2} << 20) - 1) >> 21 << 21; }

  // Returns the next `bytes`, aligned to kAlignment. Throws std::bad_alloc when the arena is full.
  void* carve(size_t bytes);

  // Gives the memory back; the addresses stay reserved. No GPU may be using it. Returns the bytes given back, 0 if it
  // is released already. Throws std::runtime_error if the GPU has no virtual memory management.
  size_t release();
  // Puts new memory behind the range; its contents are undefined. Throws like the constructor; the arena then stays
  // released.
  void resume();
  bool resident() const { return resident_; }
  // Whether release() is possible.
  bool releasable() const { return virtual_ || bytes_ == 0; }

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  static constexpr size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  int unmap() noexcept;  // returns the first error (CUresult), 0 for none
  void free_all() noexcept;

  int device_ = -1;
  bool virtual_ = false;  // false: plain memory, which cannot be released
  bool resident_ = false;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0, used_ = 0;
  size_t mapped_ = 0;             // bytes_ rounded up to the GPU's mapping granularity
  std::vector<uint64_t> chunks_;  // handles of the physical memory
  std::vector<int> peers_;        // includes the own GPU
};

}  // namespace refit::cuda
