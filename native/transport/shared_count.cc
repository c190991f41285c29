#include "transport/shared_count.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace refit {
namespace {

constexpr int64_t kHeader = 64;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// The page that holds a count. Counts are aligned to their size, so that none lies across two pages.
class CountPage {
 public:
  CountPage(int fd, int64_t offset, int64_t bytes) : size_(sysconf(_SC_PAGESIZE)) {
    struct stat info;
    if (fstat(fd, &info) != 0) fail("fstat");
    // Beyond the end a mapping is a fault that ends the process. Only its owner could cut the file in between.
    if (info.st_size < offset + bytes) {
      throw std::invalid_argument("shared memory of " + std::to_string(info.st_size) +
                                  " bytes has no reference count at byte " + std::to_string(offset));
    }
    const int64_t page = offset / size_ * size_;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, page);
    if (base_ == MAP_FAILED) fail("mmap");
    count_ = static_cast<uint8_t*>(base_) + (offset - page);
  }
  ~CountPage() { munmap(base_, size_); }
  CountPage(const CountPage&) = delete;
  CountPage& operator=(const CountPage&) = delete;

  template <typename T>
  T drop(T references) {
    std::atomic_ref<T> count(*static_cast<T*>(count_));
    T had = count.load(std::memory_order_relaxed);
    // Release: whoever takes the last reference sees that our reads are done.
    while (had > 0) {
      const T left = had - std::min(had, references);
      if (count.compare_exchange_weak(had, left, std::memory_order_acq_rel, std::memory_order_relaxed)) return left;
    }
    return -1;
  }

 private:
  const int64_t size_;
  void* base_ = nullptr;
  void* count_ = nullptr;
};

}  // namespace

int64_t drop_references(int fd, SharedCount kind, int64_t slot, int64_t references) {
  if (kind == SharedCount::kFile) {
    return CountPage(fd, 0, kHeader).drop<int32_t>(static_cast<int32_t>(references));
  }
  return CountPage(fd, kHeader + slot * 8, 8).drop<int64_t>(references);
}

}  // namespace refit
