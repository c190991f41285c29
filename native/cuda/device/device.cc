#include "cuda/device/device.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/device/device_state.h"
#include "cuda/forward/prepared_step.h"
#include "cuda/group/group.h"
#include "cuda/group/group_cuda.h"
#include "cuda/group/group_messages.h"

namespace refit::cuda {
namespace {

// Creating the contexts of eight GPUs with all their kernels takes many seconds.
constexpr double kStartSeconds = 300;

}  // namespace

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

DeviceInfo CudaDevice::info() const {
  const auto ranks = static_cast<uint64_t>(state_->config.ranks);
  const CudaMemoryPlan& plan = state_->plan;
  return {"cuda: " + state_->description, state_->config.threads, plan.weight_bytes * ranks, plan.kv_bytes * ranks,
          plan.spare_bytes * ranks};
}

const void* CudaDevice::address(int rank, int param, int set) const { return state_->memory[rank]->param(param, set); }

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
                      state->require_weights(step->set);
                      state->require_available(kTagKvCache | kTagCudaGraph);
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
    state->require_weights(access.set);
    *out = state->store_for(access).write(*own, access.set);
  });
  return std::move(*out);
}

void CudaDevice::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
                      Access access) {
  const size_t element = size_of(state_->config.params[static_cast<size_t>(param)].dtype);
  const auto bytes =
      std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(rows) * static_cast<size_t>(cols) * element);
  watchdog(access).run([state = state_, bytes, rank, param, row, col, rows, cols, access] {
    state->require_weights(access.set);
    state->store_for(access).read(rank, param, row, col, rows, cols, bytes->data(), access.set);
  });
  std::copy(bytes->begin(), bytes->end(), out);
}

std::vector<uint64_t> CudaDevice::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                           Access access) {
  const auto out = std::make_shared<std::vector<uint64_t>>();
  watchdog(access).run([state = state_, rects, tensor_cols, out, access] {
    state->require_weights(access.set);
    *out = state->store_for(access).checksum(rects, tensor_cols, access.set);
  });
  return std::move(*out);
}

void CudaDevice::scramble(uint64_t seed, int set) {
  watchdog_->run([state = state_, seed, set] {
    state->require_weights(set);
    state->store->scramble(seed, set);
  });
}

void CudaDevice::copy_weights(const std::vector<Rect>& rects, int from, int to) {
  beside_watchdog_->run([state = state_, rects, from, to] {
    state->require_weights(from);
    state->require_weights(to);
    state->store_for({.beside = true}).copy(rects, from, to);
  });
}

uint64_t CudaDevice::drop_set(int set) {
  const auto bytes = std::make_shared<uint64_t>(0);
  beside_watchdog_->run([state = state_, set, bytes] { *bytes = state->drop(set); });
  return *bytes;
}

void CudaDevice::restore_set(int set) {
  beside_watchdog_->run([state = state_, set] { state->restore(set); });
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

uint64_t CudaDevice::close_mappings(const std::string& name, Access access) {
  const auto closed = std::make_shared<uint64_t>(0);
  if (access.beside && state_->beside_store == nullptr) return 0;
  watchdog(access).run(
      [state = state_, name, closed, access] { *closed = state->store_for(access).close_mappings(name); });
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
  host.params = [state = state_](int rank, int set) {
    state->require_weights(set);
    std::vector<GroupSpan> spans;
    for (size_t id = 0; id < state->config.params.size(); id++) {
      const Param& param = state->config.params[id];
      const uint64_t row_bytes = static_cast<uint64_t>(param.cols) * size_of(param.dtype);
      const bool is_home = is_weight(param);
      spans.push_back({state->memory[rank]->param(is_home ? static_cast<int>(id) : 0, set),
                       is_home ? static_cast<uint64_t>(param.rows) * row_bytes : 0, row_bytes, param.dtype});
    }
    return spans;
  };
  host.lose = [health = s.health](const std::string& message) { health->lose(message); };
  return std::make_unique<GpuGroup>(std::move(host), options);
}

}  // namespace refit::cuda
