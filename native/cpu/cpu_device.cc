#include "cpu/cpu_device.h"

#include <stdexcept>
#include <string>

namespace refit {
namespace cpu {
namespace {

int positive(const char* name, int value) {
  if (value < 1)
    throw std::invalid_argument(std::string("bad configuration: ") + name + " is " + std::to_string(value) +
                                ", expected 1 or more");
  return value;
}

const CoreConfig& checked(const CoreConfig& config) {
  positive("ranks", config.ranks);
  positive("pages", config.pages);
  positive("page_size", config.page_size);
  if (positive("sets", config.sets) > kMostSets)
    throw std::invalid_argument("bad configuration: sets is " + std::to_string(config.sets) + ", expected at most " +
                                std::to_string(kMostSets));
  return config;
}

}  // namespace

CpuDevice::CpuDevice(const CoreConfig& config)
    : kernels_(kernels(config.isa)),
      pool_(positive("threads", config.threads)),
      store_(checked(config)),
      forward_(config, store_, kernels_, pool_) {
  store_.populate(pool_);
}

DeviceInfo CpuDevice::info() const {
  const uint64_t spare = store_.set_bytes() * static_cast<uint64_t>(store_.sets() - 1);
  return {kernels_.name, pool_.threads(), store_.bytes(), forward_.kv_bytes(), spare};
}

void CpuDevice::require_available(uint32_t tags) const {
  const uint32_t missing = tags & released_;
  if (missing == 0) return;
  throw std::runtime_error(std::string("the memory of the ") + ((missing & kTagWeights) != 0 ? "weights" : "KV cache") +
                           " is released; resume it first");
}

void CpuDevice::require_weights(int set) const {
  require_available(kTagWeights);
  if (store_.dropped(set))
    throw std::runtime_error("the memory of weight set " + std::to_string(set) + " is released; restore it first");
}

void CpuDevice::step_now(const StepBatch& batch, StepResult& result) {
  require_weights(batch.set);
  require_available(kTagKvCache);
  forward_.step(batch, result);
}

WriteOutcome CpuDevice::write(const WriteJob& job, Access access) {
  settle(access);
  require_weights(access.set);
  return store_.write(job, pool_of(access), access.set);
}

void CpuDevice::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
                     Access access) {
  settle(access);
  require_weights(access.set);
  store_.read(rank, param, row, col, rows, cols, out, access.set);
}

std::vector<uint64_t> CpuDevice::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                          Access access) {
  settle(access);
  require_weights(access.set);
  return store_.checksum(rects, tensor_cols, pool_of(access), access.set);
}

void CpuDevice::scramble(uint64_t seed, int set) {
  settle({});
  require_weights(set);
  store_.scramble(seed, pool_, set);
}

void CpuDevice::copy_weights(const std::vector<Rect>& rects, int from, int to) {
  require_weights(from);
  require_weights(to);
  store_.copy(rects, from, to, beside_);
}

uint64_t CpuDevice::drop_set(int set) { return store_.drop(set); }

void CpuDevice::restore_set(int set) { store_.restore(set, beside_); }

uint64_t CpuDevice::release_memory(uint32_t tags, bool keep_weights) {
  settle({});
  uint64_t bytes = 0;
  const uint32_t now = tags & ~released_;
  // The only step that can fail comes first, so a failure changes nothing.
  if ((now & kTagWeights) != 0) bytes += store_.release(keep_weights, pool_);
  if ((now & kTagKvCache) != 0) bytes += forward_.release_kv();
  released_ |= now;
  return bytes;
}

bool CpuDevice::resume_memory(uint32_t tags) {
  settle({});
  bool kept = true;
  if ((tags & released_ & kTagWeights) != 0) kept = store_.resume(pool_);
  // Pages of the KV cache are backed with memory again when they are written.
  released_ &= ~tags;
  return kept && (released_ & kTagWeights) == 0;
}

}  // namespace cpu

std::unique_ptr<Device> make_cpu_device(const CoreConfig& config) { return std::make_unique<cpu::CpuDevice>(config); }

}  // namespace refit
