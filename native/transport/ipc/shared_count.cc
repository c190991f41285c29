#include "transport/ipc/shared_count.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace refit {
namespace {

constexpr int64_t kHeader = 64;
// The size of torch's counter files (CUDA_IPC_REF_COUNTER_FILE_SIZE). Bytes after it are not used.
constexpr int64_t kCounterFile = kHeader + 8 * 10'000;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// The start of a file, at least `least` and at most `most` bytes of it.
class Mapping {
 public:
  Mapping(int fd, int64_t least, int64_t most) {
    struct stat info;
    if (fstat(fd, &info) != 0) fail("fstat");
    // Access to a mapping past the end of its file is a fault that ends the process, so the size is checked first. Only
    // the owner of the file could shorten it after this check.
    if (info.st_size < least) {
      throw std::invalid_argument("shared memory of " + std::to_string(info.st_size) +
                                  " bytes has no reference counts, which take " + std::to_string(least));
    }
    bytes_ = std::min<int64_t>(info.st_size, most);
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base_ == MAP_FAILED) fail("mmap");
  }
  ~Mapping() { munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  int64_t bytes() const { return bytes_; }

  template <typename T>
  T drop(int64_t offset, T references) {
    std::atomic_ref<T> count(*reinterpret_cast<T*>(static_cast<uint8_t*>(base_) + offset));
    T had = count.load(std::memory_order_relaxed);
    // Release order: the process that takes the last reference sees that our reads are done.
    while (had > 0) {
      const T left = had - std::min(had, references);
      if (count.compare_exchange_weak(had, left, std::memory_order_acq_rel, std::memory_order_relaxed)) return left;
    }
    return -1;
  }

 private:
  int64_t bytes_ = 0;
  void* base_ = nullptr;
};

}  // namespace

int64_t drop_file_references(int fd, int32_t references) {
  return Mapping(fd, kHeader, kHeader).drop<int32_t>(0, references);
}

int64_t drop_cuda_references(int fd, std::span<const int32_t> slots) {
  Mapping file(fd, kHeader + 8, kCounterFile);
  int64_t taken = 0;
  for (const int32_t slot : slots) {
    const int64_t offset = kHeader + int64_t{slot} * 8;
    if (slot < 0 || offset + 8 > file.bytes()) continue;
    if (file.drop<int64_t>(offset, 1) >= 0) ++taken;
  }
  return taken;
}

}  // namespace refit
