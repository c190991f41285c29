// The driver of ipc_stand_in.cc: files stand for the memory of GPUs.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "core/fault.h"
#include "transport/ipc/ipc_session.h"

namespace refit {
namespace {

using ipc::Cause;
using ipc::Mapping;
using ipc::Refused;

int count_gpus() {
  const char* const wanted = std::getenv("REFIT_STAND_IN_CARDS");
  return wanted == nullptr ? 2 : std::clamp(std::atoi(wanted), 0, 8);
}

std::string uuid_of(int gpu) { return "GPU-00000000-0000-0000-0000-00000000000" + std::to_string(gpu); }

class File {
 public:
  explicit File(const uint8_t* handle) {
    const auto* const text = reinterpret_cast<const char*>(handle);
    const std::string name(text, strnlen(text, Segment::kHandleBytes));
    if (name.size() < 2 || name[0] != '/' || name.find('/', 1) != std::string::npos) {
      throw Refused(Cause::kUnknown, "stand-in: the handle is no name of shared memory");
    }
    fd = shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
      throw Refused(errno == ENOENT ? Cause::kGone : Cause::kUnknown, "stand-in: " + name + ": " + strerror(errno));
  }
  ~File() { close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd = -1;
};

uint64_t bytes_of(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) throw Refused(Cause::kUnknown, std::string("stand-in: fstat: ") + strerror(errno));
  return static_cast<uint64_t>(info.st_size);
}

void* map(void* at, uint64_t bytes, int fd, int flags) {
  void* const base = mmap(at, bytes, fd < 0 ? PROT_NONE : PROT_READ, flags, fd, 0);
  if (base == MAP_FAILED) throw Refused(Cause::kNoMemory, std::string("stand-in: mmap: ") + strerror(errno));
  return base;
}

class FileDriver : public ipc::Driver {
 public:
  explicit FileDriver(int ranks) : ranks_(ranks) {}
  int ranks() const override { return ranks_; }

  Mapping open(int, const Segment& segment) override {
    bool visible = false;
    for (int gpu = 0; gpu < count_gpus(); gpu++) visible = visible || uuid_of(gpu) == segment.uuid;
    if (!visible) throw Refused(Cause::kNotVisible, "stand-in: there is no GPU " + segment.uuid);
    if (segment.handle.empty()) return open_blocks(segment);
    const File file(segment.handle.data());
    const uint64_t bytes = bytes_of(file.fd);
    if (bytes == 0) throw Refused(Cause::kUnknown, "stand-in: the segment is empty");
    return {reinterpret_cast<uint64_t>(map(nullptr, bytes, file.fd, MAP_SHARED)), bytes, false};
  }

  void close(int, const Mapping& mapping) override {
    if (munmap(reinterpret_cast<void*>(mapping.base), mapping.bytes) == 0) return;
    throw Refused(Cause::kUnknown, std::string("stand-in: munmap: ") + strerror(errno));
  }

  uint64_t open_event(int, const uint8_t* handle) override {
    const File file(handle);
    if (bytes_of(file.fd) < sizeof(int32_t)) throw Refused(Cause::kUnknown, "stand-in: the event's file is too short");
    return reinterpret_cast<uint64_t>(map(nullptr, sizeof(int32_t), file.fd, MAP_SHARED));
  }
  bool event_done(int, uint64_t event) override {
    return __atomic_load_n(reinterpret_cast<int32_t*>(event), __ATOMIC_ACQUIRE) != 0;
  }
  void close_event(int, uint64_t event) override { munmap(reinterpret_cast<void*>(event), sizeof(int32_t)); }

 private:
  static Mapping open_blocks(const Segment& segment) {
    const uint64_t bytes = segment.block_bytes * segment.blocks();
    auto* const base = static_cast<uint8_t*>(map(nullptr, bytes, -1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE));
    try {
      for (size_t i = 0; i < segment.blocks(); i++) {
        if (segment.fds.empty()) {
          const File file(segment.fabric.data() + i * Segment::kHandleBytes);
          map_block(base, i, segment.block_bytes, file.fd);
        } else {
          map_block(base, i, segment.block_bytes, segment.fds[i]);
        }
      }
    } catch (...) {
      munmap(base, bytes);
      throw;
    }
    return {reinterpret_cast<uint64_t>(base), bytes, true};
  }
  static void map_block(uint8_t* base, size_t index, uint64_t bytes, int fd) {
    if (bytes_of(fd) < bytes) throw Refused(Cause::kUnknown, "stand-in: a block is shorter than blockBytes");
    map(base + index * bytes, bytes, fd, MAP_SHARED | MAP_FIXED);
  }

  const int ranks_;
};

}  // namespace
}  // namespace refit
