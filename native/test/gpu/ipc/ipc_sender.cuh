// The other process of ipc_test: it allocates, writes, exports, and ends on command. The parent starts it by exec,
// before or after it uses CUDA itself: no context is inherited.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/philox.h"
#include "cuda/device/driver.h"
#include "test/gpu/ipc/ipc_kernels.h"
#include "test/gpu/pipe.h"

namespace refit::ipc_test {

using cuda::check;
using test::receive_all;
using test::send_all;

struct Command {
  char what = 'Q';  // A: cudaMalloc, V: blocks in one mapping, F: write and record events, Q: end
  int32_t gpu = 0;
  int32_t count = 0;    // of segments, blocks or events
  int32_t spin_ms = 0;  // F: before it writes
  uint64_t bytes = 0;   // of each
  uint64_t seed = 0;
};

// --- in the other process

class Exporter {
 public:
  std::vector<uint8_t> run(const Command& c) {
    check(cudaSetDevice(c.gpu), "cudaSetDevice");
    if (stream_ == nullptr) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    if (c.what == 'A') return allocate(c);
    if (c.what == 'V') return blocks(c);
    return fill_all(c);
  }

 private:
  void free_all() {
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (void* p : plain_) cudaFree(p);
    plain_.clear();
    parts_.clear();
  }

  std::vector<uint8_t> allocate(const Command& c) {
    free_all();
    std::vector<uint8_t> out;
    for (int i = 0; i < c.count; i++) {
      void* p = nullptr;
      check(cudaMalloc(&p, c.bytes), "cudaMalloc");
      plain_.push_back(p);
      parts_.push_back({static_cast<uint16_t*>(p), c.bytes / 2});
      cudaIpcMemHandle_t handle;
      check(cudaIpcGetMemHandle(&handle, p), "cudaIpcGetMemHandle");
      out.insert(out.end(), reinterpret_cast<uint8_t*>(&handle), reinterpret_cast<uint8_t*>(&handle + 1));
    }
    return out;
  }

  // One segment of `count` blocks, like torch's expandable segments; never freed.
  std::vector<uint8_t> blocks(const Command& c) {
    free_all();
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuMemExportToShareableHandle", &address, 10020, cudaEnableDefault, &found),
          "cuMemExportToShareableHandle");
    const auto give = reinterpret_cast<PFN_cuMemExportToShareableHandle_v10020>(address);
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = c.gpu;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUdeviceptr base = 0;
    const uint64_t all = c.bytes * static_cast<uint64_t>(c.count);
    check(cuda::driver().address_reserve(&base, all, 0, 0, 0), "cuMemAddressReserve");
    std::vector<uint8_t> out;
    for (int i = 0; i < c.count; i++) {
      CUmemGenericAllocationHandle memory = 0;
      check(cuda::driver().create(&memory, c.bytes, &prop, 0), "cuMemCreate");
      check(cuda::driver().map(base + static_cast<uint64_t>(i) * c.bytes, c.bytes, 0, memory, 0), "cuMemMap");
      int fd = -1;
      check(give(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExportToShareableHandle");
      out.insert(out.end(), reinterpret_cast<uint8_t*>(&fd), reinterpret_cast<uint8_t*>(&fd + 1));
    }
    CUmemAccessDesc access{};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(cuda::driver().set_access(base, all, &access, 1), "cuMemSetAccess");
    parts_.push_back({reinterpret_cast<uint16_t*>(base), all / 2});
    return out;
  }

  // Returns at once: only the events show when it is done.
  std::vector<uint8_t> fill_all(const Command& c) {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    events_.assign(static_cast<size_t>(c.count), nullptr);
    if (c.spin_ms > 0) spin(static_cast<uint64_t>(c.spin_ms) * 1000000, stream_);
    for (size_t s = 0; s < parts_.size(); s++) {
      fill(parts_[s].first, parts_[s].second, c.seed, s, stream_);
    }
    check(cudaGetLastError(), "fill");
    std::vector<uint8_t> out;
    for (cudaEvent_t& event : events_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess | cudaEventBlockingSync),
            "cudaEventCreate");
      check(cudaEventRecord(event, stream_), "cudaEventRecord");
      cudaIpcEventHandle_t handle;
      check(cudaIpcGetEventHandle(&handle, event), "cudaIpcGetEventHandle");
      out.insert(out.end(), reinterpret_cast<uint8_t*>(&handle), reinterpret_cast<uint8_t*>(&handle + 1));
    }
    if (events_.empty()) check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return out;
  }

  cudaStream_t stream_ = nullptr;
  std::vector<void*> plain_;
  std::vector<std::pair<uint16_t*, uint64_t>> parts_;
  std::vector<cudaEvent_t> events_;
};

// main of the other process.
inline int serve(int in, int out) {
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Exporter exporter;
  try {
    for (Command command;;) {
      receive_all(in, &command, sizeof command);
      if (command.what == 'Q') return 0;
      int32_t failed = 0;
      std::vector<uint8_t> reply;
      try {
        reply = exporter.run(command);
      } catch (const std::exception& e) {
        failed = 1;
        reply.assign(e.what(), e.what() + std::strlen(e.what()));
      }
      const auto bytes = static_cast<int32_t>(reply.size());
      send_all(out, &failed, sizeof failed);
      send_all(out, &bytes, sizeof bytes);
      send_all(out, reply.data(), reply.size());
    }
  } catch (const std::exception&) {
    return 0;  // the parent has ended
  }
}

// --- in the parent

class Sender {
 public:
  Sender() {
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0) throw std::runtime_error("pipe");
    pid = fork();
    if (pid == 0) {
      close(down[1]);
      close(up[0]);
      const std::string in = std::to_string(down[0]), out = std::to_string(up[1]);
      execl("/proc/self/exe", "ipc_test", "--sender", in.c_str(), out.c_str(), nullptr);
      _exit(127);
    }
    close(down[0]);
    close(up[1]);
    to_ = down[1];
    from_ = up[0];
  }
  ~Sender() {
    kill();
    close(to_);
    close(from_);
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  std::vector<uint8_t> request(const Command& command) {
    send_all(to_, &command, sizeof command);
    int32_t failed = 0, bytes = 0;
    receive_all(from_, &failed, sizeof failed);
    receive_all(from_, &bytes, sizeof bytes);
    std::vector<uint8_t> reply(static_cast<size_t>(bytes));
    receive_all(from_, reply.data(), reply.size());
    if (failed != 0) throw std::runtime_error("sender: " + std::string(reply.begin(), reply.end()));
    return reply;
  }

  void kill() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = -1;
  }

  pid_t pid = -1;

 private:
  int to_ = -1, from_ = -1;
};

}  // namespace refit::ipc_test
