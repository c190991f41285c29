#include "cuda/device/device_state.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

#include "core/memory_error.h"
#include "cuda/device/check.h"
#include "cuda/device/dynamic.h"
#include "cuda/device/environment.h"
#include "cuda/device/gpus.h"
#include "cuda/device/uuid.h"
#include "cuda/exchange/peers.h"

namespace refit::cuda {
namespace {

// NCCL takes one or two seconds to connect the GPUs of one machine.
constexpr double kJoinSeconds = 120;
// Writes beside steps must leave cores to the steps. A slot of the ring has room for any chunk (write_batches.h).
constexpr int kBesideReaders = 4;
constexpr uint64_t kBesideRingBytes = 128 << 20;
constexpr MemoryTag kTags[] = {kTagWeights, kTagKvCache, kTagCudaGraph};

// Opens NCCL. If it is missing, the error begins with `why`: the reason why the engine needs it.
const NcclApi& need_nccl(const std::string& why) {
  try {
    return open_nccl();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(why +
                             ", so tensor parallelism needs NCCL: choose GPUs that reach each other (\"refit "
                             "devices\" shows which do), use one rank, or install NCCL. " +
                             error.what());
  }
}

const char* name_of(uint32_t tags) {
  if ((tags & kTagWeights) != 0) return "weights";
  return (tags & kTagKvCache) != 0 ? "KV cache" : "activations (cuda_graph)";
}

}  // namespace

void CudaDevice::State::start() {
  const std::vector<int> gpus = choose_gpus(config, count_gpus(), switched_on("REFIT_CUDA_SHARE_CARD"));
  if (config.ranks > 1 && switched_on("CUDA_LAUNCH_BLOCKING")) {
    throw std::invalid_argument(
        "CUDA_LAUNCH_BLOCKING is set, but ranks that wait for each other would never end: unset it, or use one rank");
  }
  std::map<std::string, int> kinds;
  for (const int gpu : std::set<int>(gpus.begin(), gpus.end())) {
    cudaDeviceProp prop;
    check(cudaGetDeviceProperties(&prop, gpu), "cudaGetDeviceProperties");
    check_capability("GPU " + std::to_string(gpu) + " (" + prop.name + ", " + uuid_text(prop.uuid) + ")", prop.major,
                     prop.minor);
    uuids[gpu] = uuid_text(prop.uuid);
    kinds[std::string(prop.name) + " (sm_" + std::to_string(prop.major * 10 + prop.minor) + ")"]++;
  }
  for (const auto& [kind, count] : kinds) {
    description += (description.empty() ? "" : ", ") + (count > 1 ? std::to_string(count) + " x " : "") + kind;
  }
  const std::string why = why_nccl(gpus);
  const NcclApi* const nccl = why.empty() ? nullptr : &need_nccl(why);
  for (int r = 0; r < config.ranks; r++) ranks.push_back(std::make_unique<Rank>(r, gpus[r], health));
  if (nccl != nullptr) {
    comms = join_ranks(ranks, *nccl, kJoinSeconds);
  } else {
    on_all(ranks, [&](Rank& rank) { enable_peers(rank, gpus); });
  }
  check_room(gpus);
  const ForwardSizes sizes = forward_sizes(config);
  memory.resize(config.ranks);
  on_all(ranks, [&](Rank& rank) {
    const std::vector<int> own{rank.device};
    memory[rank.index] = std::make_unique<RankMemory>(config, sizes, rank, nccl != nullptr ? own : gpus);
  });

  std::vector<ForwardMemory> parts;
  for (const auto& part : memory) parts.push_back(part->forward());
  std::vector<GpuParams> sets(static_cast<size_t>(config.sets), {&ranks, config.params, {}});
  for (int set = 0; set < config.sets; set++) {
    std::vector<Element*>& addresses = sets[static_cast<size_t>(set)].addresses;
    for (const auto& part : memory) {
      for (size_t id = 0; id < config.params.size(); id++) addresses.push_back(part->param(static_cast<int>(id), set));
    }
  }
  forward = std::make_unique<Forward>(config, ranks, std::move(parts), comms);
  store = std::make_unique<GpuStore>(sets, config.threads, GpuStore::kRingBytes);
  if (config.sets > 1 || !std::all_of(config.params.begin(), config.params.end(), is_weight)) {
    for (int r = 0; r < config.ranks; r++)
      beside_ranks.push_back(std::make_unique<Rank>(r, gpus[r], health, Rank::Priority::kBesideSteps));
    for (GpuParams& set : sets) set.ranks = &beside_ranks;
    beside_store = std::make_unique<GpuStore>(std::move(sets), kBesideReaders, kBesideRingBytes, config.shadow_rate);
  }
  const LibraryVersion blas = find_cublas_lt();
  description += blas.version.empty() ? ", no cuBLASLt" : ", cuBLASLt " + blas.version;
  if (nccl != nullptr) {
    description += ", ranks exchange by " + nccl->name() + " (" + why + ")";
  } else if (config.ranks > 1) {
    description += ", ranks exchange by peer access";
  }
}

// Runs on the ranks' threads: only they have a current GPU.
void CudaDevice::State::close() noexcept {
  beside_store.reset();
  beside_ranks.clear();
  store.reset();
  forward.reset();
  try {
    // All ranks at once: a communicator ends in order only when all its ranks leave together.
    if (!comms.empty()) {
      on_all(ranks, [this](Rank& rank) {
        rank.doing("leave NCCL's communicator");
        comms[rank.index]->finish();
      });
    }
  } catch (...) {
  }
  comms.clear();
  try {
    if (!memory.empty()) on_all(ranks, [this](Rank& rank) { memory[rank.index].reset(); });
  } catch (...) {
  }
  memory.clear();
  ranks.clear();
}

// Runs when the contexts exist: the memory that is free now is all that the engine can get.
void CudaDevice::State::check_room(const std::vector<int>& gpus) {
  std::vector<size_t> free(ranks.size()), total(ranks.size());
  on_all(ranks, [&](Rank& rank) { check(cudaMemGetInfo(&free[rank.index], &total[rank.index]), "cudaMemGetInfo"); });
  const uint64_t exchange = Arena::footprint(forward_sizes(config).peer);
  const uint64_t each = plan.weight_bytes + plan.spare_bytes + plan.kv_bytes + plan.scratch_bytes + exchange;
  for (size_t r = 0; r < ranks.size(); r++) {
    const auto sharing = static_cast<uint64_t>(std::count(gpus.begin(), gpus.end(), gpus[r]));
    if (each * sharing <= free[r]) continue;
    throw NoMemory("GPU " + std::to_string(gpus[r]) + " is too full for " + ranks[r]->label() + ": " +
                   gigabytes(each * sharing) + " are needed (weights " + gigabytes(plan.weight_bytes) +
                   (config.sets > 1 ? ", their second set " + gigabytes(plan.spare_bytes) : "") + ", KV cache " +
                   gigabytes(plan.kv_bytes) + ", activations " + gigabytes(plan.scratch_bytes) + ", exchange " +
                   gigabytes(exchange) + (sharing > 1 ? "; for each of " + std::to_string(sharing) + " ranks" : "") +
                   "), " + gigabytes(free[r]) + " of " + gigabytes(total[r]) +
                   " are free; \"nvidia-smi\" shows what else uses the GPU");
  }
}

void CudaDevice::State::require_available(uint32_t tags) const {
  const uint32_t missing = tags & released;
  if (missing == 0) return;
  throw std::runtime_error(std::string("the memory of the ") + name_of(missing) + " is released; resume it first");
}

void CudaDevice::State::require_weights(int set) const {
  require_available(kTagWeights);
  if (memory.front()->dropped(set))
    throw std::runtime_error("the memory of weight set " + std::to_string(set) + " is released; restore it first");
}

GpuStore& CudaDevice::State::store_for(Access access) {
  if (!access.beside) return *store;
  if (beside_store) return *beside_store;
  throw std::invalid_argument("this device has no parameters that are written beside steps");
}

uint64_t CudaDevice::State::release(uint32_t tags, bool keep_weights) {
  const uint32_t now = tags & ~released;
  if (now == 0) return 0;
  for (const auto& part : memory) {
    if (part->releasable()) continue;
    throw std::runtime_error(
        "this GPU has no virtual memory management (GPUs of virtual machines often have none): its memory cannot be "
        "released "
        "while the engine lives");
  }
  // No GPU may touch memory that another one is about to unmap, so wait until all of them are idle.
  on_all(ranks, [](Rank& rank) {
    rank.doing("wait for the GPU before memory is released");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
  if ((now & kTagWeights) != 0 && keep_weights) {
    try {
      on_all(ranks, [this](Rank& rank) { memory[rank.index]->keep_weights(rank); });
    } catch (...) {
      for (const auto& part : memory) part->drop_kept();
      throw;
    }
  }
  std::vector<uint64_t> bytes(ranks.size());
  if ((now & kTagCudaGraph) != 0) forward->drop_graphs();
  for (const MemoryTag tag : kTags) {
    if ((now & tag) == 0) continue;
    released |= tag;  // set it first: after a failure in the middle the memory counts as released, never as half usable
    on_all(ranks, [&](Rank& rank) { bytes[rank.index] += memory[rank.index]->release(tag, rank); });
  }
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

bool CudaDevice::State::resume(uint32_t tags) {
  bool kept = true;
  for (const MemoryTag tag : kTags) {
    if ((tags & released & tag) == 0) continue;
    try {
      on_all(ranks, [&](Rank& rank) { memory[rank.index]->resume(tag, rank); });
    } catch (...) {
      // All ranks or none.
      on_all(ranks, [&](Rank& rank) { memory[rank.index]->release(tag, rank); });
      throw;
    }
    if (tag == kTagWeights) {
      kept = memory[0]->kept();
      for (const auto& part : memory) part->drop_kept();
    }
    released &= ~tag;
  }
  return kept && (released & kTagWeights) == 0;
}

uint64_t CudaDevice::State::drop(int set) {
  std::vector<uint64_t> bytes(ranks.size());
  on_all(beside_ranks, [&](Rank& rank) { bytes[rank.index] = memory[rank.index]->drop(set, rank); });
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

void CudaDevice::State::restore(int set) {
  try {
    on_all(beside_ranks, [&](Rank& rank) { memory[rank.index]->restore(set, rank); });
  } catch (...) {
    const std::exception_ptr cause = std::current_exception();
    try {
      drop(set);  // all ranks or none
    } catch (...) {
    }
    std::rethrow_exception(cause);
  }
}

}  // namespace refit::cuda
