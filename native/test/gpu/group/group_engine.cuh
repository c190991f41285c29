// An engine's ranks and parameters with a process group, and trainers in other processes that join it
// (group_trainer.cuh).
#pragma once
#include <cmath>
#include <future>
#include <random>

#include "cuda/device/device.h"
#include "cuda/device/uuid.h"
#include "cuda/group/group.h"
#include "cuda/group/group_cuda.h"
#include "cuda/weights/write.h"
#include "test/check.h"
#include "test/gpu/group/group_trainer.cuh"

using namespace refit;
using namespace refit::cuda;
using namespace refit::group_test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kPatience = 60;

GroupDeadline in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

Command command(char what, uint64_t seed = 0, int late_ms = 0) {
  Command c;
  c.what = what;
  c.seed = seed;
  c.late_ms = late_ms;
  return c;
}

// The weights of an engine: ranks on GPUs, parameters, a store.
struct Engine {
  Engine(std::vector<int> on, std::vector<Param> shapes) : gpus(std::move(on)) {
    for (size_t r = 0; r < gpus.size(); r++) ranks.push_back(std::make_unique<Rank>(static_cast<int>(r), gpus[r]));
    GpuParams params{&ranks, std::move(shapes), {}};
    for (size_t r = 0; r < gpus.size(); r++) {
      check(cudaSetDevice(gpus[r]), "cudaSetDevice");
      for (const Param& shape : params.shapes) {
        void* memory = nullptr;
        check(cudaMalloc(&memory, static_cast<size_t>(shape.rows * shape.cols) * sizeof(Element)), "cudaMalloc");
        params.addresses.push_back(static_cast<Element*>(memory));
      }
    }
    addresses = params.addresses;
    shapes_ = params.shapes;
    store = std::make_unique<GpuStore>(std::vector{std::move(params)}, 2);
  }
  ~Engine() {
    store.reset();
    for (size_t i = 0; i < addresses.size(); i++) {
      cudaSetDevice(gpus[i / shapes_.size()]);
      cudaFree(addresses[i]);
    }
  }
  Engine(const Engine&) = delete;

  std::unique_ptr<GpuGroup> group(int size, int first, bool warm_up = false) {
    NcclGroupOptions options;
    options.size = size;
    options.first_rank = first;
    options.warm_up = warm_up;
    GroupHost host;
    host.ranks = static_cast<int>(gpus.size());
    host.open = [this](int rank) { return open_group_gpu(rank, gpus[static_cast<size_t>(rank)]); };
    host.params = [this](int rank, int /* set */) {
      std::vector<GroupSpan> spans;
      for (size_t id = 0; id < shapes_.size(); id++) {
        const auto row_bytes = static_cast<uint64_t>(shapes_[id].cols) * sizeof(Element);
        spans.push_back(
            {param(static_cast<size_t>(rank), id), static_cast<uint64_t>(shapes_[id].rows) * row_bytes, row_bytes});
      }
      return spans;
    };
    host.lose = [](const std::string& message) { CHECKF(false, "lost: %s", message.c_str()); };
    return std::make_unique<GpuGroup>(std::move(host), options);
  }

  uint8_t* param(size_t rank, size_t id) const {
    return reinterpret_cast<uint8_t*>(addresses[rank * shapes_.size() + id]);
  }

  const std::vector<int> gpus;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Param> shapes_;
  std::vector<Element*> addresses;
  std::unique_ptr<GpuStore> store;
};

std::vector<uint8_t> id_of(const std::string& text) { return {text.begin(), text.end()}; }

Command join(const std::string& id, int size, int rank, int gpu) {
  Command c = command('J');
  c.size = size, c.rank = rank, c.gpu = gpu;
  std::memcpy(c.id, id.data(), sizeof c.id);
  return c;
}

// Ours are ranks 1, 2, ...; trainer 0 is rank 0 on GPU 0, other trainers follow us in rank and GPU.
std::unique_ptr<GpuGroup> meet(Engine& engine, std::vector<Trainer*> trainers, double* seconds = nullptr) {
  const int ours = static_cast<int>(engine.gpus.size());
  const int size = ours + static_cast<int>(trainers.size());
  const std::string id = trainers[0]->request(command('I'));
  for (size_t t = 0; t < trainers.size(); t++) {
    const int rank = t == 0 ? 0 : ours + static_cast<int>(t);
    trainers[t]->send(join(id, size, rank, rank));
  }
  auto group = engine.group(size, 1);
  const auto began = Clock::now();
  group->connect(id_of(id).data(), in(kPatience));
  if (seconds != nullptr) *seconds = since(began);
  for (Trainer* trainer : trainers) trainer->reply();
  return group;
}

void check_slot(const Engine& engine, const GpuGroup& group, int slot, const std::vector<GroupPart>& parts,
                uint64_t seed, const char* what) {
  const StagedSlot staged = group.staged(slot);
  for (size_t rank = 0; rank < engine.gpus.size(); rank++) {
    check(cudaSetDevice(engine.gpus[rank]), "cudaSetDevice");
    for (size_t i = 0; i < parts.size(); i++) {
      const Wrong wrong = compare(staged.source.of(static_cast<int>(rank)) + parts[i].offset, parts[i].bytes, seed + i);
      CHECKF(wrong.count == 0, "%s, our rank %zu, broadcast %zu of %zu (%llu bytes): %llu are wrong, the first is %llu",
             what, rank, i + 1, parts.size(), static_cast<unsigned long long>(parts[i].bytes), wrong.count,
             wrong.first);
    }
  }
}

// Writes a staged piece: tensors one after another into as many parameters, whole on every rank.
WriteJob job_of(const GpuGroup& group, int slot, size_t tensors, size_t first_param, int64_t rows, int64_t cols,
                int ranks) {
  WriteJob job;
  job.sources.push_back(group.staged(slot).source);
  const auto bytes = static_cast<uint64_t>(rows * cols) * 2;
  for (size_t i = 0; i < tensors; i++) {
    job.tensors.push_back({0, i * bytes, DType::kBFloat16, rows, cols, static_cast<uint64_t>(cols) * 2, 2});
    for (int rank = 0; rank < ranks; rank++) {
      job.rects.push_back({static_cast<int>(i), rank, static_cast<int>(first_param + i), 0, 0, rows, cols, 0, 0});
    }
  }
  return job;
}

}  // namespace
