#include "cuda/device/memory.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "core/memory_error.h"
#include "cuda/device/check.h"
#include "cuda/device/host_memory.h"
#include "cuda/exchange/peers.h"

namespace refit::cuda {
namespace {

// Measured on Hopper GPUs and rounded up: a context with all kernels loaded, cuBLASLt, streams and tables.
constexpr uint64_t kContextBytes = uint64_t{800} << 20;

// NCCL takes this much of a GPU in addition: its buffers and its kernels, which are all loaded at the start.
constexpr uint64_t kNcclBytes = uint64_t{1} << 30;

// Size of one copy between GPU and host. Each copy begins a new deadline of the watchdog.
constexpr size_t kCopyBytes = size_t{64} << 20;

uint64_t param_bytes(const Param& param) {
  uint64_t elements = 0, bytes = 0;
  if (param.rows < 0 || param.cols < 0 ||
      __builtin_mul_overflow(static_cast<uint64_t>(param.rows), static_cast<uint64_t>(param.cols), &elements) ||
      __builtin_mul_overflow(elements, uint64_t{size_of(param.dtype)}, &bytes) || bytes > (uint64_t{1} << 50)) {
    throw std::invalid_argument("bad configuration: parameter " + param.name + " is [" + std::to_string(param.rows) +
                                ", " + std::to_string(param.cols) + "], more than a GPU can hold");
  }
  return bytes;
}

// If the GPUs are unknown or cannot be queried, the engine reports that when it starts.
bool exchanges_by_nccl(const CoreConfig& config) {
  try {
    return !why_nccl(config.gpus).empty();
  } catch (const std::exception&) {
    cudaGetLastError();
    return false;
  }
}

}  // namespace

std::string gigabytes(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

uint64_t weight_bytes(const CoreConfig& config) {
  uint64_t bytes = 0;
  for (const Param& param : config.params) bytes += Arena::padded(param_bytes(param));
  return bytes;
}

CudaMemoryPlan plan_memory(const CoreConfig& config) {
  if (config.dtype != DType::kBFloat16) {
    throw std::invalid_argument(
        "bad configuration: the CUDA engine computes in bfloat16 only, got float32: use bfloat16, or the CPU");
  }
  for (const Param& param : config.params) {
    // float32: the table of adapters (core/adapters.h); the forward pass refuses it elsewhere.
    if (param.dtype == DType::kBFloat16 || param.dtype == DType::kFloat32) continue;
    throw std::invalid_argument("bad configuration: parameter " + param.name + " is " + name_of(param.dtype) +
                                ", and the CUDA engine holds bfloat16 and float32");
  }
  if (config.ranks < 1 || config.ranks > kMaxRanks) {
    throw std::invalid_argument("bad configuration: " + std::to_string(config.ranks) + " ranks, expected 1 to " +
                                std::to_string(kMaxRanks));
  }
  if (config.pages < 1 || config.page_size < 1) {
    throw std::invalid_argument("bad configuration: " + std::to_string(config.pages) + " KV pages of " +
                                std::to_string(config.page_size) + " tokens, expected 1 or more of each");
  }
  const ForwardSizes sizes = forward_sizes(config);
  CudaMemoryPlan plan;
  plan.weight_bytes = Arena::footprint(weight_bytes(config));
  plan.kv_bytes = Arena::footprint(sizes.kv);
  plan.scratch_bytes = Arena::footprint(sizes.scratch);
  plan.fixed_bytes = Arena::footprint(sizes.peer) + kContextBytes + (exchanges_by_nccl(config) ? kNcclBytes : 0);
  return plan;
}

RankMemory::RankMemory(const CoreConfig& config, const ForwardSizes& sizes, Rank& rank, const std::vector<int>& peers) {
  rank.doing("allocate memory");
  weights_ = Arena(rank.device, weight_bytes(config), peers);
  rank.doing("allocate memory");
  kv_ = Arena(rank.device, sizes.kv, peers);
  scratch_ = Arena(rank.device, sizes.scratch, peers);
  peer_ = Arena(rank.device, sizes.peer, peers);
  for (const Param& param : config.params) params_.push_back(static_cast<bf16*>(weights_.carve(param_bytes(param))));
  rank.doing("clear weights");
  if (weights_.bytes() > 0) check(cudaMemsetAsync(weights_.data(), 0, weights_.bytes(), rank.stream), "clear weights");
  if (peer_.bytes() > 0) check(cudaMemsetAsync(peer_.data(), 0, peer_.bytes(), rank.stream), "clear exchange buffers");
  check(cudaStreamSynchronize(rank.stream), "clear weights");
}

ForwardMemory RankMemory::forward() const {
  ForwardMemory memory;
  memory.params.assign(params_.begin(), params_.end());
  memory.kv = kv_.data();
  memory.scratch = scratch_.data();
  memory.peer = peer_.data();
  return memory;
}

void RankMemory::keep_weights(Rank& rank) {
  const size_t bytes = weights_.bytes();
  // Ranks that release at the same time may see the same free memory; then the system's allocation decides.
  if (const uint64_t left = available_host_bytes(); bytes > left) {
    throw NoMemory("the weights of rank " + std::to_string(rank.index) + " need " + gigabytes(bytes) +
                   " of host memory to be kept in, " + gigabytes(left) +
                   " are available: free host memory, or release the weights without keeping them");
  }
  refit::Arena copy(bytes);
  for (size_t at = 0; at < bytes; at += kCopyBytes) {
    rank.doing("copy weights to the host");
    check(cudaMemcpyAsync(copy.data() + at, weights_.data() + at, std::min(kCopyBytes, bytes - at),
                          cudaMemcpyDeviceToHost, rank.stream),
          "copy weights to the host");
    check(cudaStreamSynchronize(rank.stream), "copy weights to the host");
  }
  kept_ = std::move(copy);
}

Arena& RankMemory::arena(MemoryTag tag) { return tag == kTagWeights ? weights_ : tag == kTagKvCache ? kv_ : scratch_; }

uint64_t RankMemory::release(MemoryTag tag, Rank& rank) {
  rank.doing("release memory");
  return arena(tag).release();
}

void RankMemory::resume(MemoryTag tag, Rank& rank) {
  rank.doing("resume memory");
  arena(tag).resume();
  if (tag != kTagWeights || weights_.bytes() == 0) return;
  if (!kept()) {
    // Rows that no checkpoint writes must be zero, as in a newly loaded engine.
    check(cudaMemsetAsync(weights_.data(), 0, weights_.bytes(), rank.stream), "clear weights");
    check(cudaStreamSynchronize(rank.stream), "clear weights");
    return;
  }
  for (size_t at = 0; at < weights_.bytes(); at += kCopyBytes) {
    rank.doing("copy weights back");
    check(cudaMemcpyAsync(weights_.data() + at, kept_.data() + at, std::min(kCopyBytes, weights_.bytes() - at),
                          cudaMemcpyHostToDevice, rank.stream),
          "copy weights back");
    check(cudaStreamSynchronize(rank.stream), "copy weights back");
  }
}

}  // namespace refit::cuda
