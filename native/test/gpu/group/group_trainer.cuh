// The other process of group_test: a rank of a group that calls NCCL as a trainer's torch does. It receives commands
// through a pipe, and dies on command. It is started by exec, so it inherits no context.
#pragma once
#include <cuda_runtime.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device/check.h"
#include "cuda/group/nccl.h"
#include "test/gpu/group/group_kernels.h"
#include "test/gpu/pipe.h"

namespace refit::group_test {

using cuda::check;
using test::receive_all;
using test::send_all;

// Bytes [from, from + count) of broadcast `seed` are at `data`, on the current GPU.
inline Wrong compare(const uint8_t* data, uint64_t count, uint64_t seed, uint64_t from = 0) {
  Wrong* on_gpu = nullptr;
  Wrong wrong{0, ~0ull};
  check(cudaMalloc(&on_gpu, sizeof wrong), "cudaMalloc");
  check(cudaMemcpy(on_gpu, &wrong, sizeof wrong, cudaMemcpyHostToDevice), "upload");
  count_wrong(data, count, seed, from, on_gpu);
  check(cudaMemcpy(&wrong, on_gpu, sizeof wrong, cudaMemcpyDeviceToHost), "count_wrong");
  cudaFree(on_gpu);
  return wrong;
}

struct Command {
  char what = 'Q';
  int32_t size = 0, rank = 0, gpu = 0;
  int32_t root = 0;
  int32_t late_ms = 0;
  int32_t count = 0;   // number of sizes, which follow
  int32_t rounds = 1;  // T: number of rounds
  uint64_t seed = 0;
  char id[128] = {};
};

// --- in the other process

class Performer {
 public:
  // Returns the reply to the parent.
  std::string run(const Command& c, const std::vector<uint64_t>& sizes) {
    if (c.late_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(c.late_ms));
    switch (c.what) {
      case 'I': {
        const cuda::NcclUniqueId id = cuda::new_nccl_id(cuda::open_nccl());
        return {id.bytes, sizeof id.bytes};
      }
      case 'J':
        return join(c);
      case 'B':  // broadcasts of these sizes, from this rank
        broadcast(c, sizes, false);
        break;
      case 'H':  // the same, and then it hangs for ever
        broadcast(c, sizes, false);
        for (;;) pause();
      case 'T':  // one broadcast of the first size again and again, from this rank, timed; the bytes are the first's
        return timed(c, sizes);
      case 'L':  // receives broadcasts of rank `root` and checks them
        broadcast(c, sizes, true);
        break;
      case 'R':
        reserve(512);
        check(cudaMemsetAsync(memory_, 0, 512, stream_), "clear");
        comm_->all_reduce(memory_, memory_, 1, cuda::kNcclFloat32, cuda::kNcclSum, stream_);
        break;
      case 'E':
        comm_->finish();
        comm_.reset();
        return "";
      case 'A':
        comm_.reset();
        return "";
      default:
        throw std::runtime_error("no such command");
    }
    check(cudaStreamSynchronize(stream_), "the broadcasts");
    comm_->check();
    return "";
  }

 private:
  std::string join(const Command& c) {
    check(cudaSetDevice(c.gpu), "cudaSetDevice");
    if (stream_ == nullptr) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda::NcclUniqueId id;
    std::memcpy(id.bytes, c.id, sizeof id.bytes);
    comm_ = std::make_unique<cuda::NcclComm>(cuda::open_nccl(), id, c.size, c.rank, cuda::NcclWait{30});
    return "";
  }

  void reserve(uint64_t bytes) {
    if (bytes <= room_) return;
    if (memory_ != nullptr) cudaFree(memory_);
    check(cudaMalloc(&memory_, bytes), "cudaMalloc");
    room_ = bytes;
  }

  void broadcast(const Command& c, const std::vector<uint64_t>& sizes, bool listen) {
    uint64_t total = 0;
    std::vector<uint64_t> at;
    for (const uint64_t size : sizes) at.push_back(total), total += (size + 255) / 256 * 256;
    reserve(total + 256);
    for (size_t i = 0; i < sizes.size(); i++) {
      uint8_t* const data = memory_ + at[i];
      if (!listen && sizes[i] > 0) fill(data, sizes[i], c.seed + i, stream_);
      if (sizes[i] > 0) {
        comm_->broadcast(data, data, sizes[i], cuda::kNcclUint8, listen ? c.root : comm_->rank(), stream_);
      }
    }
    if (!listen) return;
    check(cudaStreamSynchronize(stream_), "the broadcasts");
    for (size_t i = 0; i < sizes.size(); i++) {
      const Wrong wrong = compare(memory_ + at[i], sizes[i], c.seed + i);
      if (wrong.count == 0) continue;
      throw std::runtime_error("broadcast " + std::to_string(i) + ": " + std::to_string(wrong.count) +
                               " bytes are wrong, the first is " + std::to_string(wrong.first));
    }
  }

  std::string timed(const Command& c, const std::vector<uint64_t>& sizes) {
    reserve(sizes.at(0));
    fill(memory_, sizes[0], c.seed, stream_);
    check(cudaStreamSynchronize(stream_), "fill");
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < c.rounds; i++) {
      comm_->broadcast(memory_, memory_, sizes[0], cuda::kNcclUint8, comm_->rank(), stream_);
    }
    check(cudaStreamSynchronize(stream_), "the broadcasts");
    return std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }

  cudaStream_t stream_ = nullptr;
  uint8_t* memory_ = nullptr;
  uint64_t room_ = 0;
  std::unique_ptr<cuda::NcclComm> comm_;
};

// main of the other process.
inline int perform(int in, int out) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Performer performer;
  try {
    for (Command command;;) {
      receive_all(in, &command, sizeof command);
      if (command.what == 'Q') return 0;
      std::vector<uint64_t> sizes(static_cast<size_t>(command.count));
      receive_all(in, sizes.data(), sizes.size() * sizeof sizes[0]);
      int32_t failed = 0;
      std::string reply;
      try {
        reply = performer.run(command, sizes);
      } catch (const std::exception& e) {
        failed = 1;
        reply = e.what();
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

class Trainer {
 public:
  Trainer() {
    int down[2], up[2];
    if (pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    pid = fork();
    if (pid == 0) {
      const int in = dup(down[0]), out = dup(up[1]);  // the duplicates stay open
      execl("/proc/self/exe", "group_test", "--trainer", std::to_string(in).c_str(), std::to_string(out).c_str(),
            nullptr);
      _exit(127);
    }
    close(down[0]);
    close(up[1]);
    to_ = down[1];
    from_ = up[0];
  }
  ~Trainer() {
    kill();
    close(to_);
    close(from_);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Sends a command; `reply` waits for its result.
  void send(Command command, const std::vector<uint64_t>& sizes = {}) {
    command.count = static_cast<int32_t>(sizes.size());
    send_all(to_, &command, sizeof command);
    send_all(to_, sizes.data(), sizes.size() * sizeof sizes[0]);
  }
  std::string reply() {
    int32_t failed = 0, bytes = 0;
    receive_all(from_, &failed, sizeof failed);
    receive_all(from_, &bytes, sizeof bytes);
    std::string reply(static_cast<size_t>(bytes), ' ');
    receive_all(from_, reply.data(), reply.size());
    if (failed != 0) throw std::runtime_error("trainer: " + reply);
    return reply;
  }
  std::string request(const Command& command, const std::vector<uint64_t>& sizes = {}) {
    send(command, sizes);
    return reply();
  }

  void signal(int number) { ::kill(pid, number); }
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

}  // namespace refit::group_test
