#include "core/arena.h"

#include <sys/mman.h>

#include <new>
#include <utility>

#include "core/fault.h"

namespace refit {

Arena::Arena(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (REFIT_FAULT(kAlloc)) throw std::bad_alloc();
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
  // A hint: fewer page faults at the first write and fewer TLB misses in every step. Refused where the kernel has none.
  madvise(data_, bytes, MADV_HUGEPAGE);
}

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      used_(std::exchange(other.used_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(used_, other.used_);
  return *this;
}

void* Arena::carve(size_t bytes) {
  const size_t take = padded(bytes);
  if (take < bytes || take > bytes_ - used_) throw std::bad_alloc();
  void* p = data_ + used_;
  used_ += take;
  return p;
}

}  // namespace refit
