// A model's layout with the addresses of its parameters in the store.
#pragma once
#include "core/layout.h"
#include "core/store.h"

namespace refit::cpu {

class Model : public Layout {
 public:
  // Throws std::invalid_argument, also for a dtype that the CPU does not compute in.
  Model(const CoreConfig& config, const Store& store);

  const void* at(int rank, int param) const { return store_.param(rank, param); }
  // The address of row `row` of the parameter.
  const void* at(int rank, int param, int64_t row) const;

 private:
  const Store& store_;
};

}  // namespace refit::cpu
