#include "core/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>
#include <vector>

#include "core/fault.h"

namespace refit {

// MADV_POPULATE_WRITE of Linux 5.14; the C library's headers may be older than the kernel.
constexpr int kPopulateWrite = 23;

Arena::Arena(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (REFIT_FAULT(kAlloc)) throw std::bad_alloc();
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
  // A hint: fewer page faults at the first write and fewer TLB misses in every step. An error is ignored: the kernel
  // may have none.
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

void Arena::populate(Pool& pool) {
  constexpr size_t kStretch = 16 << 20;
  const auto stretches = static_cast<int64_t>((bytes_ + kStretch - 1) / kStretch);
  pool.parallel_for(stretches, [&](int64_t index, int) {
    const size_t from = static_cast<size_t>(index) * kStretch;
    const size_t bytes = std::min(kStretch, bytes_ - from);
    if (madvise(data_ + from, bytes, kPopulateWrite) == 0) return;
    if (errno == ENOMEM || errno == EFAULT) throw std::bad_alloc();
    for (size_t at = from; at < from + bytes; at += 4096) data_[at] = 0;  // a kernel before 5.14
  });
}

size_t Arena::release() { return bytes_ == 0 ? 0 : drop_memory(data_, bytes_); }

void Arena::resume(Pool& pool) {
  try {
    if (REFIT_FAULT(kAlloc)) throw std::bad_alloc();
    populate(pool);
  } catch (...) {
    release();
    throw;
  }
}

size_t drop_memory(uint8_t* data, size_t bytes) {
  constexpr size_t kStretch = size_t{1} << 30;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t pages = 0;
  std::vector<unsigned char> resident;
  for (size_t from = 0; from < bytes; from += kStretch) {
    const size_t length = std::min(kStretch, bytes - from);
    resident.assign((length + page - 1) / page, 0);
    // The number is only for reports. A part whose state cannot be read is not counted.
    if (mincore(data + from, length, resident.data()) != 0) continue;
    pages += std::count_if(resident.begin(), resident.end(), [](unsigned char state) { return (state & 1) != 0; });
  }
  madvise(data, bytes, MADV_DONTNEED);
  return std::min(pages * page, bytes);
}

}  // namespace refit
