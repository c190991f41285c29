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

uint64_t bytes_of(const Param& param) {
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

// Rows that no checkpoint writes must be zero, as in a newly loaded engine.
void clear(const Arena& weights, Rank& rank) {
  rank.doing("clear weights");
  if (weights.bytes() == 0) return;
  check(cudaMemsetAsync(weights.data(), 0, weights.bytes(), rank.stream), "clear weights");
}

void copy(uint8_t* to, const uint8_t* from, size_t bytes, cudaMemcpyKind kind, const char* what, Rank& rank) {
  for (size_t at = 0; at < bytes; at += kCopyBytes) {
    rank.doing(what);
    check(cudaMemcpyAsync(to + at, from + at, std::min(kCopyBytes, bytes - at), kind, rank.stream), what);
    check(cudaStreamSynchronize(rank.stream), what);
  }
}

}  // namespace

std::string gigabytes(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

ParamBytes param_bytes(const CoreConfig& config) {
  ParamBytes bytes;
  for (const Param& param : config.params) {
    (is_weight(param) ? bytes.weights : bytes.adapters) += Arena::padded(bytes_of(param));
  }
  return bytes;
}

CudaMemoryPlan plan_memory(const CoreConfig& config) {
  if (config.dtype != kElementType) {
    throw std::invalid_argument(std::string("bad configuration: this CUDA library computes in ") +
                                name_of(kElementType) + " only, got " + name_of(config.dtype));
  }
  for (const Param& param : config.params) {
    // float32: the table of adapters (core/adapters.h); the forward pass refuses it elsewhere.
    if (param.dtype == kElementType || param.dtype == DType::kFloat32) continue;
    throw std::invalid_argument("bad configuration: parameter " + param.name + " is " + name_of(param.dtype) +
                                ", and this CUDA library holds " + name_of(kElementType) + " and float32");
  }
  if (config.ranks < 1 || config.ranks > kMaxRanks) {
    throw std::invalid_argument("bad configuration: " + std::to_string(config.ranks) + " ranks, expected 1 to " +
                                std::to_string(kMaxRanks));
  }
  if (config.sets < 1 || config.sets > kMostSets) {
    throw std::invalid_argument("bad configuration: " + std::to_string(config.sets) +
                                " sets of weights, expected 1 to " + std::to_string(kMostSets));
  }
  if (config.pages < 1 || config.page_size < 1) {
    throw std::invalid_argument("bad configuration: " + std::to_string(config.pages) + " KV pages of " +
                                std::to_string(config.page_size) + " tokens, expected 1 or more of each");
  }
  const ForwardSizes sizes = forward_sizes(config);
  CudaMemoryPlan plan;
  const ParamBytes params = param_bytes(config);
  plan.weight_bytes = Arena::footprint(params.weights) + Arena::footprint(params.adapters);
  plan.spare_bytes = Arena::footprint(params.weights) * static_cast<uint64_t>(config.sets - 1);
  plan.kv_bytes = Arena::footprint(sizes.kv);
  plan.scratch_bytes = Arena::footprint(sizes.scratch);
  // Ranks that exchange by NCCL have no graphs.
  const uint64_t more = exchanges_by_nccl(config) ? kNcclBytes : sizes.graphs;
  plan.fixed_bytes = Arena::footprint(sizes.peer) + kContextBytes + more;
  return plan;
}

RankMemory::RankMemory(const CoreConfig& config, const ForwardSizes& sizes, Rank& rank, const std::vector<int>& peers) {
  const ParamBytes bytes = param_bytes(config);
  rank.doing("allocate memory");
  adapters_ = Arena(rank.device, bytes.adapters, peers);
  for (int set = 0; set < config.sets; set++) {
    rank.doing("allocate memory");
    Arena& weights = weights_.emplace_back(rank.device, bytes.weights, peers);
    std::vector<Element*>& params = params_.emplace_back();
    for (const Param& param : config.params) {
      const bool is_shared = set > 0 && !is_weight(param);
      Arena& home = is_weight(param) ? weights : adapters_;
      params.push_back(is_shared ? params_[0][params.size()] : static_cast<Element*>(home.carve(bytes_of(param))));
    }
  }
  rank.doing("allocate memory");
  kv_ = Arena(rank.device, sizes.kv, peers);
  scratch_ = Arena(rank.device, sizes.scratch, peers);
  peer_ = Arena(rank.device, sizes.peer, peers);
  for (const Arena* arena : arenas(kTagWeights)) clear(*arena, rank);
  if (peer_.bytes() > 0) check(cudaMemsetAsync(peer_.data(), 0, peer_.bytes(), rank.stream), "clear exchange buffers");
  check(cudaStreamSynchronize(rank.stream), "clear weights");
}

ForwardMemory RankMemory::forward() const {
  ForwardMemory memory;
  for (const std::vector<Element*>& params : params_) memory.params.emplace_back(params.begin(), params.end());
  memory.kv = kv_.data();
  memory.scratch = scratch_.data();
  memory.peer = peer_.data();
  return memory;
}

std::vector<Arena*> RankMemory::arenas(MemoryTag tag) {
  if (tag != kTagWeights) return {tag == kTagKvCache ? &kv_ : &scratch_};
  std::vector<Arena*> out;
  for (size_t set = 0; set < weights_.size(); set++) {
    if (!dropped_[set]) out.push_back(&weights_[set]);
  }
  if (adapters_.bytes() > 0) out.push_back(&adapters_);
  return out;
}

bool RankMemory::releasable() const {
  return std::all_of(weights_.begin(), weights_.end(), [](const Arena& arena) { return arena.releasable(); }) &&
         adapters_.releasable() && kv_.releasable() && scratch_.releasable();
}

void RankMemory::keep_weights(Rank& rank) {
  const std::vector<Arena*> all = arenas(kTagWeights);
  uint64_t bytes = 0;
  for (const Arena* arena : all) bytes += arena->bytes();
  // Ranks that release at the same time may see the same free memory; then the system's allocation decides.
  if (const uint64_t left = available_host_bytes(); bytes > left) {
    throw NoMemory("the weights of rank " + std::to_string(rank.index) + " need " + gigabytes(bytes) +
                   " of host memory to be kept in, " + gigabytes(left) +
                   " are available: free host memory, or release the weights without keeping them");
  }
  std::vector<refit::Arena> copies;
  for (const Arena* arena : all) {
    copies.emplace_back(arena->bytes());
    copy(copies.back().data(), arena->data(), arena->bytes(), cudaMemcpyDeviceToHost, "copy weights to the host", rank);
  }
  kept_ = std::move(copies);
}

uint64_t RankMemory::release(MemoryTag tag, Rank& rank) {
  rank.doing("release memory");
  uint64_t bytes = 0;
  for (Arena* arena : arenas(tag)) bytes += arena->release();
  return bytes;
}

void RankMemory::resume(MemoryTag tag, Rank& rank) {
  rank.doing("resume memory");
  const std::vector<Arena*> all = arenas(tag);
  // The caller releases the tag again if one of them finds no memory.
  for (Arena* arena : all) arena->resume();
  if (tag != kTagWeights) return;
  for (size_t i = 0; i < all.size(); i++) {
    if (kept()) {
      copy(all[i]->data(), kept_[i].data(), all[i]->bytes(), cudaMemcpyHostToDevice, "copy weights back", rank);
    } else {
      clear(*all[i], rank);
    }
  }
  check(cudaStreamSynchronize(rank.stream), "clear weights");
}

uint64_t RankMemory::drop(int set, Rank& rank) {
  rank.doing("release a set of weights");
  // First: after a failure in the middle it counts as dropped. A release of what has no memory is 0.
  dropped_[set] = true;
  return weights_[static_cast<size_t>(set)].release();
}

void RankMemory::restore(int set, Rank& rank) {
  if (!dropped_[set]) return;
  rank.doing("resume a set of weights");
  Arena& arena = weights_[static_cast<size_t>(set)];
  arena.resume();
  clear(arena, rank);
  check(cudaStreamSynchronize(rank.stream), "clear weights");
  dropped_[set] = false;
}

}  // namespace refit::cuda
