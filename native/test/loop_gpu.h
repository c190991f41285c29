// A GPU of a process group in host memory, for nccl_loop.cc.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/memory_error.h"
#include "cuda/group/group_gpu.h"
#include "test/nccl_loop.h"

namespace refit::test {

// Shared by all GPUs of a test.
struct LoopGpus {
  std::atomic<int64_t> bytes{0};  // allocated bytes
  int64_t room = int64_t{1} << 40;
  std::atomic<int> open{0};
  std::atomic<bool> downloads_fail{false};
};

class LoopGpu : public cuda::GroupGpu {
 public:
  LoopGpu(int rank, LoopGpus& gpus) : rank_(rank), gpus_(gpus) { gpus_.open++; }
  ~LoopGpu() override { gpus_.open--; }

  std::string label() const override { return "rank " + std::to_string(rank_) + " (loop GPU)"; }
  const char* last_operation() const override { return operation_; }
  std::future<void> run(std::function<void()> fn) override {
    auto task = std::make_shared<std::packaged_task<void()>>(std::move(fn));
    std::future<void> future = task->get_future();
    thread_.post([task] { (*task)(); });
    return future;
  }
  void doing(const char* operation) noexcept override { operation_ = operation; }
  cuda::NcclStream stream() override { return reinterpret_cast<cuda::NcclStream>(&stream_); }

  uint8_t* allocate(uint64_t bytes) override {
    const auto wanted = static_cast<int64_t>(bytes);
    if (gpus_.bytes.fetch_add(wanted) + wanted > gpus_.room) {
      gpus_.bytes -= wanted;
      throw NoMemory(label() + " is full");
    }
    auto* const at = static_cast<uint64_t*>(std::malloc(bytes + kHead));
    *at = bytes;
    return reinterpret_cast<uint8_t*>(at) + kHead;
  }
  void free(uint8_t* memory) noexcept override {
    auto* const at = reinterpret_cast<uint64_t*>(memory - kHead);
    gpus_.bytes -= static_cast<int64_t>(*at);
    std::free(at);
  }
  void upload(uint8_t* to, const uint8_t* from, uint64_t bytes) override {
    stream_.post([to, copy = std::vector<uint8_t>(from, from + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
  }
  void download(uint8_t* to, const uint8_t* from, uint64_t bytes) override {
    while (!stream_.idle()) std::this_thread::yield();
    if (gpus_.downloads_fail) throw std::runtime_error(label() + ": the copy failed");
    std::memcpy(to, from, bytes);
  }
  bool idle() override { return stream_.idle(); }
  void mark(int set, int index) override {
    if (index == 0) passed_[set] = 0;
    stream_.post([this, set] { passed_[set]++; });
  }
  bool passed(int set, int index) override { return passed_[set] > index; }

 private:
  static constexpr size_t kHead = 64;

  const int rank_;
  LoopGpus& gpus_;
  std::atomic<const char*> operation_{"start"};
  std::atomic<int> passed_[kMarkSets] = {};
  LoopStream stream_;
  LoopStream thread_;  // destroyed first
};

}  // namespace refit::test
