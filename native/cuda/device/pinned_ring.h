// Slots of pinned host memory that every GPU can read. Allocated once.
#pragma once
#include <cstddef>
#include <cstdint>

namespace refit::cuda {

class PinnedRing {
 public:
  // A GPU must be current here and in the destructor. Throws CudaError.
  PinnedRing(size_t slots, size_t slot_bytes);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  size_t slots() const { return slots_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // The slot of turn n of a user that goes round: slot n mod slots().
  uint8_t* slot(size_t turn) const { return data_ + turn % slots_ * slot_bytes_; }

 private:
  const size_t slots_, slot_bytes_;
  uint8_t* data_ = nullptr;
};

}  // namespace refit::cuda
