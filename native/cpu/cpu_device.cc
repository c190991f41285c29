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

DeviceInfo CpuDevice::info() const { return {kernels_.name, pool_.threads(), store_.bytes(), forward_.kv_bytes()}; }

void CpuDevice::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) {
  store_.read(rank, param, row, col, rows, cols, out);
}

std::vector<uint64_t> CpuDevice::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols) {
  return store_.checksum(rects, tensor_cols, pool_);
}

}  // namespace cpu

std::unique_ptr<Device> make_cpu_device(const CoreConfig& config) { return std::make_unique<cpu::CpuDevice>(config); }

}  // namespace refit
