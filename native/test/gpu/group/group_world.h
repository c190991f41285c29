// Engines and trainers in groups of NCCL for group_life.cc and group_bytes.cc: their library is
// native/test/nccl_loop.cc, whose ranks are threads and whose GPUs are host memory.
#pragma once
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/group/group.h"
#include "cuda/group/nccl.h"
#include "test/check.h"
#include "test/loop_gpu.h"

namespace refit::test {

using namespace refit::cuda;

using Clock = std::chrono::steady_clock;

inline std::string library;
inline LoopControl* control = nullptr;
inline LoopGpus gpus;
inline std::vector<std::string> losses;

inline GroupDeadline in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
inline double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

inline uint8_t value(uint64_t round, uint64_t i) {
  uint64_t z = round * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
  z ^= z >> 29;
  return static_cast<uint8_t>(z * 0x94d049bb133111ebu >> 56);
}

inline std::vector<uint8_t> coded(uint64_t round, uint64_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (uint64_t i = 0; i < bytes; i++) out[i] = value(round, i);
  return out;
}

struct Engine {
  explicit Engine(int ranks) : params(static_cast<size_t>(ranks)) {}
  std::vector<std::vector<std::vector<uint8_t>>> params;  // [rank][parameter]

  std::unique_ptr<GpuGroup> group(NcclGroupOptions options) {
    options.library = library;
    GroupHost host;
    host.ranks = static_cast<int>(params.size());
    host.open = [](int rank) { return std::make_unique<LoopGpu>(rank, gpus); };
    host.params = [this](int rank, int /* set */) {
      std::vector<GroupSpan> out;
      for (auto& param : params[static_cast<size_t>(rank)]) out.push_back({param.data(), param.size(), param.size()});
      return out;
    };
    host.lose = [](const std::string& message) { losses.push_back(message); };
    return std::make_unique<GpuGroup>(std::move(host), options);
  }
};

// The other side: a rank that calls NCCL itself, as a trainer's torch does.
struct Trainer {
  Trainer(const std::vector<uint8_t>& id, int size, int rank) : id_(id), size_(size), rank_(rank) {}
  ~Trainer() { stream_wait(); }
  void join(double seconds = 20) {
    NcclUniqueId unique;
    std::memcpy(unique.bytes, id_.data(), sizeof unique.bytes);
    comm = std::make_unique<NcclComm>(open_nccl(library), unique, size_, rank_, NcclWait{seconds});
  }
  NcclStream stream() { return reinterpret_cast<NcclStream>(&stream_); }
  void broadcast(const std::vector<uint8_t>& data) {
    comm->broadcast(data.data(), nullptr, data.size(), kNcclUint8, rank_, stream());
  }
  void barrier() {
    one_ = 1;
    comm->all_reduce(&one_, &one_, 1, kNcclFloat32, kNcclSum, stream());
  }
  void stream_wait() {
    for (const auto began = Clock::now(); !stream_.idle() && since(began) < 30;) sleep_ms(1);
  }
  float sum() const { return one_; }

  std::unique_ptr<NcclComm> comm;

 private:
  const std::vector<uint8_t> id_;
  const int size_, rank_;
  float one_ = 1;
  LoopStream stream_;
};

// Connects the group and the only other rank at the same time.
inline void connect(GpuGroup& group, Trainer& trainer, const std::vector<uint8_t>& id) {
  std::thread joining([&] { trainer.join(); });
  group.connect(id.data(), in(20));
  joining.join();
}

inline std::string failure_of(const std::function<void()>& fn, GroupErrorKind kind) {
  try {
    fn();
  } catch (const GroupError& error) {
    CHECKF(error.kind == kind, "kind %d, expected %d: %s", static_cast<int>(error.kind), static_cast<int>(kind),
           error.what());
    return error.what();
  } catch (const std::exception& error) {
    CHECKF(false, "another exception: %s", error.what());
    return error.what();
  }
  CHECK(!"no exception");
  return "";
}

inline void expect(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    CHECKF(message.find(part) != std::string::npos, "\"%s\" misses \"%s\"", message.c_str(), part);
  }
}

inline void expect_none_left(const char* after) {
  CHECKF(control->live == 0, "%s: %d communicators live", after, control->live);
  CHECKF(gpus.bytes == 0, "%s: %lld bytes are left", after, static_cast<long long>(gpus.bytes));
  CHECKF(gpus.open == 0, "%s: %d GPUs are open", after, gpus.open.load());
  CHECKF(losses.empty(), "%s: %s", after, losses.empty() ? "" : losses[0].c_str());
}

// group_bytes.cc: received, sent and exchanged bytes arrive at the right place.
void test_bytes(unsigned seed);
// group_p2p.cc: so do messages of single ranks.
void test_messages();

}  // namespace refit::test
