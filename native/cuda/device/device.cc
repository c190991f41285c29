#include "cuda/device/device.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "core/memory_error.h"
#include "cuda/device/check.h"
#include "cuda/device/dynamic.h"
#include "cuda/device/environment.h"
#include "cuda/device/gpus.h"
#include "cuda/device/memory.h"
#include "cuda/device/uuid.h"
#include "cuda/exchange/exchange.h"
#include "cuda/exchange/peers.h"
#include "cuda/forward/forward.h"
#include "cuda/forward/prepared_step.h"
#include "cuda/group/group.h"
#include "cuda/group/group_cuda.h"
#include "cuda/group/group_messages.h"
#include "cuda/weights/write.h"

namespace refit::cuda {
namespace {

// Creating the contexts of eight GPUs with all their kernels takes many seconds.
constexpr double kStartSeconds = 300;
// NCCL takes one or two seconds to connect the GPUs of one machine.
constexpr double kJoinSeconds = 120;
// Writes beside steps are small, and must leave cores to the steps.
constexpr int kBesideReaders = 4;
constexpr uint64_t kBesideRingBytes = 64 << 20;
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

// Shared with the threads: a thread that is stuck in an operation keeps alive what it uses.
struct CudaDevice::State {
  explicit State(const CoreConfig& config) : config(config) {}
  ~State() { close(); }

  void start();
  void close() noexcept;
  void check_room(const std::vector<int>& gpus);
  void require_available(uint32_t tags) const;
  uint64_t release(uint32_t tags, bool keep_weights);
  bool resume(uint32_t tags);

  const CoreConfig config;
  CudaMemoryPlan plan;
  std::string description;
  std::map<int, std::string> uuids;  // of the GPUs
  std::shared_ptr<Health> health = std::make_shared<Health>();
  uint32_t released = 0;  // MemoryTag bits
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<Rank>> beside_ranks;  // for Access::beside: threads and streams of their own
  std::vector<std::unique_ptr<NcclComm>> comms;     // empty where GPUs reach each other
  std::vector<std::unique_ptr<RankMemory>> memory;
  std::unique_ptr<Forward> forward;
  std::unique_ptr<GpuStore> store, beside_store;  // the second where parameters are written beside steps

  GpuStore& store_for(Access access);
};

CudaDevice::CudaDevice(const CoreConfig& config) : state_(std::make_shared<State>(config)) {
  const double seconds = watchdog_seconds(config.watchdog_seconds);
  state_->plan = plan_memory(config);  // checks the configuration
  watchdog_ = std::make_unique<Watchdog>(state_->health, seconds);
  try {
    watchdog_->run([state = state_] { state->start(); }, kStartSeconds);
    beside_watchdog_ = std::make_unique<Watchdog>(state_->health, seconds);
  } catch (const DeviceLost&) {
    new std::shared_ptr<State>(state_);  // never deleted, see the destructor
    throw;
  }
}

CudaDevice::~CudaDevice() {
  try {
    // Freeing can get stuck too, so the watchdog runs it.
    watchdog_->run([state = state_] { state->close(); });
  } catch (...) {
  }
  // Never destroy the state of a lost GPU: at best its calls fail, and threads that are stuck still use it.
  if (state_->health->lost()) new std::shared_ptr<State>(state_);
}

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
  GpuParams params{&ranks, config.params, {}};
  for (const auto& part : memory) {
    parts.push_back(part->forward());
    for (size_t id = 0; id < config.params.size(); id++) params.addresses.push_back(part->param(static_cast<int>(id)));
  }
  forward = std::make_unique<Forward>(config, ranks, std::move(parts), comms);
  store = std::make_unique<GpuStore>(params, config.threads, GpuStore::kRingBytes);
  if (!std::all_of(config.params.begin(), config.params.end(), is_weight)) {
    for (int r = 0; r < config.ranks; r++) beside_ranks.push_back(std::make_unique<Rank>(r, gpus[r], health));
    params.ranks = &beside_ranks;
    beside_store = std::make_unique<GpuStore>(std::move(params), kBesideReaders, kBesideRingBytes);
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
  const uint64_t each = plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes + exchange;
  for (size_t r = 0; r < ranks.size(); r++) {
    const auto sharing = static_cast<uint64_t>(std::count(gpus.begin(), gpus.end(), gpus[r]));
    if (each * sharing <= free[r]) continue;
    throw NoMemory("GPU " + std::to_string(gpus[r]) + " is too full for " + ranks[r]->label() + ": " +
                   gigabytes(each * sharing) + " are needed (weights " + gigabytes(plan.weight_bytes) + ", KV cache " +
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

GpuStore& CudaDevice::State::store_for(Access access) {
  if (!access.beside) return *store;
  if (beside_store) return *beside_store;
  throw std::invalid_argument("this device has no parameters that are written beside steps");
}

DeviceInfo CudaDevice::info() const {
  const auto ranks = static_cast<uint64_t>(state_->config.ranks);
  return {"cuda: " + state_->description, state_->config.threads, state_->plan.weight_bytes * ranks,
          state_->plan.kv_bytes * ranks};
}

const void* CudaDevice::address(int rank, int param, int) const { return state_->memory[rank]->param(param); }

void CudaDevice::begin(const StepBatch& batch) {
  if (begun_.size() == kMostBegun) throw std::logic_error("more steps are begun than may be");
  // Planned on this thread, while the step before runs. If the step ends as lost, a stuck thread may still use it, so
  // it shares in all that it needs.
  const std::shared_ptr<PreparedStep> step = state_->forward->prepare(batch);
  if (!state_->forward->has_room(*step)) watchdog_->run([state = state_, step] { state->forward->make_room(*step); });
  state_->forward->write(*step);
  const auto result = std::make_shared<StepResult>();
  begun_.push_back({result, watchdog_->begin([state = state_, step, result] {
                      state->forward->feed(*step);
                      state->require_available(kTagWeights | kTagKvCache | kTagCudaGraph);
                      for (auto& rank : state->ranks) rank->progress().begin_step();
                      state->forward->run(*step, *result);
                      for (auto& rank : state->ranks) rank->progress().end_step();
                    })});
}

void CudaDevice::collect(StepResult& result) {
  if (begun_.empty()) throw std::logic_error("no step has begun");
  const Begun step = std::move(begun_.front());
  begun_.pop_front();
  watchdog_->wait(step.task);
  result = std::move(*step.result);
}

WriteOutcome CudaDevice::write(const WriteJob& job, Access access) {
  const auto own = std::make_shared<WriteJob>(job);
  const auto out = std::make_shared<WriteOutcome>();
  watchdog(access).run([state = state_, own, out, access] {
    state->require_available(kTagWeights);
    *out = state->store_for(access).write(*own);
  });
  return std::move(*out);
}

void CudaDevice::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
                      Access access) {
  const size_t element = size_of(state_->config.params[static_cast<size_t>(param)].dtype);
  const auto bytes =
      std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(rows) * static_cast<size_t>(cols) * element);
  watchdog(access).run([state = state_, bytes, rank, param, row, col, rows, cols, access] {
    state->require_available(kTagWeights);
    state->store_for(access).read(rank, param, row, col, rows, cols, bytes->data());
  });
  std::copy(bytes->begin(), bytes->end(), out);
}

std::vector<uint64_t> CudaDevice::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                           Access access) {
  const auto out = std::make_shared<std::vector<uint64_t>>();
  watchdog(access).run([state = state_, rects, tensor_cols, out, access] {
    state->require_available(kTagWeights);
    *out = state->store_for(access).checksum(rects, tensor_cols);
  });
  return std::move(*out);
}

void CudaDevice::scramble(uint64_t seed, int) {
  watchdog_->run([state = state_, seed] {
    state->require_available(kTagWeights);
    state->store->scramble(seed);
  });
}

uint64_t CudaDevice::release_memory(uint32_t tags, bool keep_weights) {
  const auto bytes = std::make_shared<uint64_t>(0);
  watchdog_->run([state = state_, tags, keep_weights, bytes] { *bytes = state->release(tags, keep_weights); });
  return *bytes;
}

bool CudaDevice::resume_memory(uint32_t tags) {
  const auto kept = std::make_shared<bool>(false);
  watchdog_->run([state = state_, tags, kept] { *kept = state->resume(tags); });
  return *kept;
}

uint64_t CudaDevice::close_mappings(const std::string& name) {
  const auto closed = std::make_shared<uint64_t>(0);
  watchdog_->run([state = state_, name, closed] { *closed = state->store->close_mappings(name); });
  return *closed;
}

void CudaDevice::fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) {
  // Copies: if this ends as lost, threads that are stuck use their own copies.
  const auto own = std::make_shared<Segment>(segment);
  const auto into = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(bytes));
  watchdog_->run([state = state_, own, offset, timeout_ms, into] {
    state->store->fetch(*own, offset, into->size(), timeout_ms, into->data());
  });
  std::copy(into->begin(), into->end(), out);
}

std::unique_ptr<NcclGroup> CudaDevice::nccl_group(const NcclGroupOptions& options) {
  State& s = *state_;
  std::vector<std::string> gpus;
  for (const auto& rank : s.ranks) gpus.push_back(s.uuids.at(rank->device));
  check_group_gpus(gpus, options);
  GroupHost host;
  host.ranks = s.config.ranks;
  host.open = [state = state_](int rank) { return open_group_gpu(rank, state->ranks[rank]->device); };
  host.params = [state = state_](int rank) {
    state->require_available(kTagWeights);
    std::vector<GroupSpan> spans;
    for (size_t id = 0; id < state->config.params.size(); id++) {
      const Param& param = state->config.params[id];
      const uint64_t row_bytes = static_cast<uint64_t>(param.cols) * size_of(param.dtype);
      spans.push_back({state->memory[rank]->param(static_cast<int>(id)), static_cast<uint64_t>(param.rows) * row_bytes,
                       row_bytes, param.dtype});
    }
    return spans;
  };
  host.lose = [health = s.health](const std::string& message) { health->lose(message); };
  return std::make_unique<GpuGroup>(std::move(host), options);
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
  uint64_t sum = 0;
  for (const uint64_t part : bytes) sum += part;
  return sum;
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

}  // namespace refit::cuda
