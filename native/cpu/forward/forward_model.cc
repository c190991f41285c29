#include "cpu/forward/forward_model.h"

#include <stdexcept>

namespace refit::cpu {

Model::Model(const CoreConfig& config, const Store& store) : Layout(config), store_(store) {
  if (config.dtype != DType::kBFloat16 && config.dtype != DType::kFloat32)
    throw std::invalid_argument("bad configuration: the CPU computes in bfloat16 or float32");
}

const void* Model::at(int rank, int param, int64_t row) const {
  const int64_t bytes = row * store_.shape(param).cols * static_cast<int64_t>(size_of(store_.shape(param).dtype));
  return static_cast<const uint8_t*>(at(rank, param)) + bytes;
}

}  // namespace refit::cpu
