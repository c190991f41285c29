// The ranks of a forward pass on GPUs, several of them on one GPU or each on its own.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device/check.h"
#include "cuda/exchange/exchange.h"
#include "cuda/exchange/peers.h"
#include "cuda/forward/forward.h"
#include "test/check.h"
#include "test/forward_reference.h"
#include "test/gpu/adapters/adapters_model.h"

using namespace refit;
using namespace refit::test;
using cuda::check;

namespace {

constexpr int kPages = 160, kPageSize = 16, kMaxTokens = 700, kMaxContext = 1500;

// Memory of a GPU with guard bytes on both sides.
class Region {
 public:
  explicit Region(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&base_), bytes + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(base_, kPoison, bytes + 2 * kGuard), "poison");
  }
  ~Region() { cudaFree(base_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  uint8_t* data() const { return base_ + kGuard; }
  // Bytes of 0xff are NaN.
  void poison() const { check(cudaMemset(data(), kPoison, bytes_), "poison"); }
  bool whole() const {
    std::vector<uint8_t> guard(2 * kGuard);
    check(cudaMemcpy(guard.data(), base_, kGuard, cudaMemcpyDeviceToHost), "guard");
    check(cudaMemcpy(guard.data() + kGuard, base_ + kGuard + bytes_, kGuard, cudaMemcpyDeviceToHost), "guard");
    return std::all_of(guard.begin(), guard.end(), [](uint8_t b) { return b == kPoison; });
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr uint8_t kPoison = 0xff;
  uint8_t* base_ = nullptr;
  size_t bytes_;
};

// Null if NCCL is missing.
[[maybe_unused]] const cuda::NcclApi* find_api() {
  try {
    return &cuda::open_nccl();
  } catch (const std::runtime_error& error) {
    std::printf("!!!!! NCCL IS NOT HERE, SO IT WAS NOT TESTED: %s\n", error.what());
    return nullptr;
  }
}

[[maybe_unused]] bool all_reach(const std::vector<int>& gpus) {
  return std::all_of(gpus.begin(), gpus.end(), [&](int from) {
    return std::all_of(gpus.begin(), gpus.end(), [&](int to) { return cuda::reaches(from, to); });
  });
}

// A test model on GPUs, in plain allocations. With `nccl` no rank touches another's memory.
class Gpus {
 public:
  Gpus(const TestModel& model, const std::vector<int>& gpus, const cuda::NcclApi* nccl = nullptr,
       const SlotAdapters* adapters = nullptr, int pages = kPages, bool graphs = true, int sets = 1) {
    const int count = static_cast<int>(gpus.size());
    CoreConfig config = model.config(count, 1, "", pages, kPageSize);
    config.max_step_tokens = kMaxTokens, config.max_context = kMaxContext, config.graphs = graphs;
    config.sets = sets;
    if (adapters != nullptr) adapters->extend(config);
    const cuda::ForwardSizes sizes = cuda::forward_sizes(config);
    std::vector<cuda::ForwardMemory> memory(count);
    for (int r = 0; r < count; ++r) {
      check(cudaSetDevice(gpus[r]), "cudaSetDevice");
      memory[r].kv = add(sizes.kv)->data(), memory[r].peer = add(sizes.peer)->data();
      scratch_.push_back(add(sizes.scratch));
      memory[r].scratch = scratch_.back()->data();
      memory[r].params.resize(static_cast<size_t>(config.sets));
      for (auto& params : memory[r].params) {
        for (const Param& p : config.params) {
          const bool adapter = !is_weight(p);
          const std::vector<float> values =
              adapter ? adapters->values(p.name, r, count) : model.shard(p.name, r, count).x;
          params.push_back(upload(values, p.dtype));
        }
      }
      check(cudaDeviceSynchronize(), "upload");
      ranks_.push_back(std::make_unique<cuda::Rank>(r, gpus[r]));
    }
    if (nccl != nullptr) {
      comms_ = cuda::join_ranks(ranks_, *nccl, 60);
    } else {
      cuda::on_all(ranks_, [&](cuda::Rank& rank) { cuda::enable_peers(rank, gpus); });
    }
    for (int r = 0; r < count; ++r) params_.push_back(memory[r].params);
    forward_ = std::make_unique<cuda::Forward>(config, ranks_, memory, comms_);
  }
  ~Gpus() {
    forward_.reset();
    if (!comms_.empty()) cuda::on_all(ranks_, [&](cuda::Rank& rank) { comms_[rank.index]->finish(); });
  }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;

  // slots: the adapter of each sequence; empty: as the batch has it.
  StepResult step(const BatchBuilder& b, bool poison = true, const std::vector<int32_t>& slots = {}, int set = 0) {
    for (size_t r = 0; poison && r < ranks_.size(); ++r) {
      // Nothing in scratch may outlive a step.
      check(cudaSetDevice(ranks_[r]->device), "cudaSetDevice");
      scratch_[r]->poison();
      check(cudaDeviceSynchronize(), "poison");
    }
    StepBatch batch = b.view();
    if (!slots.empty()) batch.adapters = slots;
    batch.set = set;
    StepResult result;
    forward_->step(batch, result);
    return result;
  }
  // Writes a parameter of one rank in place.
  void write(size_t param, const std::vector<float>& values, int set = 0, size_t rank = 0,
             DType dtype = cuda::kElementType) {
    const std::vector<uint16_t> bits = stored(values, dtype);
    check(cudaMemcpy(const_cast<cuda::Element*>(params_[rank][static_cast<size_t>(set)][param]), bits.data(),
                     bits.size() * 2, cudaMemcpyHostToDevice),
          "write");
    check(cudaDeviceSynchronize(), "write");
  }
  cuda::Forward& forward() { return *forward_; }
  void check_guards(const char* where) const {
    for (size_t i = 0; i < regions_.size(); ++i)
      CHECKF(regions_[i]->whole(), "%s: bytes before or behind region %zu were written", where, i);
  }

 private:
  Region* add(size_t bytes) {
    regions_.push_back(std::make_unique<Region>(bytes));
    return regions_.back().get();
  }

  static std::vector<uint16_t> stored(const std::vector<float>& values, DType dtype) {
    std::vector<uint16_t> bits(values.size() * size_of(dtype) / 2);
    if (dtype == DType::kFloat32) {
      std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
    } else {
      for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(from_float(dtype, values[i]));
    }
    return bits;
  }
  const cuda::Element* upload(const std::vector<float>& values, DType dtype) {
    const std::vector<uint16_t> bits = stored(values, dtype);
    uint8_t* const to = add(bits.size() * 2)->data();
    check(cudaMemcpy(to, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice), "upload");
    return reinterpret_cast<const cuda::Element*>(to);
  }

  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<Region*> scratch_;
  std::vector<std::vector<std::vector<const cuda::Element*>>> params_;  // by rank and set
  std::vector<std::unique_ptr<cuda::Rank>> ranks_;
  std::vector<std::unique_ptr<cuda::NcclComm>> comms_;
  std::unique_ptr<cuda::Forward> forward_;
};

}  // namespace
