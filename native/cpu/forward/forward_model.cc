#include "cpu/forward/forward_model.h"

namespace refit::cpu {

Model::Model(const CoreConfig& config, const Store& store) : Layout(config), store_(store) {}

const void* Model::at(int rank, int param, int64_t row) const {
  const int64_t bytes = row * store_.shape(param).cols * static_cast<int64_t>(size_of(store_.shape(param).dtype));
  return static_cast<const uint8_t*>(at(rank, param)) + bytes;
}

}  // namespace refit::cpu
