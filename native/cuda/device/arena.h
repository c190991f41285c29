// GPU memory by tag: an address range that is reserved once and stays, and physical memory behind it that can go and
// come back (CUDA virtual memory management). Readable and writable by every GPU of the engine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace refit::cuda {

class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  // Physical memory comes in pieces of this: few calls to release and resume, and the last piece is smaller.
  static constexpr size_t kChunk = size_t{256} << 20;

  Arena() = default;
  // Reserves `bytes` on GPU `device` (runtime ordinal), mapped for all GPUs in `peers`, and puts memory behind it.
  // Throws NoMemory with the GPU's free memory where it is full; CudaError.
  Arena(int device, size_t bytes, const std::vector<int>& peers);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Bytes of physical memory behind an arena of `bytes`, where GPUs map in pieces of 2 MiB (all that are known do).
  static constexpr size_t footprint(size_t bytes) { return (bytes + (size_t{2} << 20) - 1) >> 21 << 21; }

  // The next `bytes`, aligned to kAlignment. Throws std::bad_alloc when the arena is full.
  void* carve(size_t bytes);

  // Gives the memory back; addresses stay. Nothing on any GPU may be using it. Returns the bytes given back (0 where
  // it is released already). Throws std::runtime_error where the GPU has no virtual memory management.
  size_t release();
  // Puts (other) memory behind it, contents undefined. Throws like the constructor; then it stays released.
  void resume();
  bool resident() const { return resident_; }
  // Whether release() can be done.
  bool releasable() const { return virtual_ || bytes_ == 0; }

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  static constexpr size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  int unmap() noexcept;  // the first error (CUresult), 0: none
  void free_all() noexcept;

  int device_ = -1;
  bool virtual_ = false;  // else plain memory, that cannot be released
  bool resident_ = false;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0, used_ = 0;
  size_t mapped_ = 0;             // bytes_ rounded to what the GPU maps
  std::vector<uint64_t> chunks_;  // handles of the physical memory
  std::vector<int> peers_;        // the own GPU is among them
};

}  // namespace refit::cuda
