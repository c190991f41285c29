// A model's layout with the addresses of its parameters in the store.
#pragma once
#include "core/layout.h"
#include "core/store.h"

namespace refit::cpu {

class Model : public Layout {
 public:
  // Throws std::invalid_argument.
  Model(const CoreConfig& config, const Store& store);

  // The set of weights that `at` returns addresses of from now on.
  void use(int set) { set_ = set; }
  const void* at(int rank, int param) const { return store_.param(rank, param, set_); }
  // The address of row `row` of the parameter.
  const void* at(int rank, int param, int64_t row) const;

 private:
  const Store& store_;
  int set_ = 0;
};

}  // namespace refit::cpu
