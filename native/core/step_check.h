// A step's batch is checked in full before anything is computed: the KV cache of running requests is at stake.
#pragma once
#include "core/step.h"

namespace refit {

struct BatchLimits {
  int vocab, pages, page_size;
};

// Throws std::invalid_argument that names the sequence or row, what was expected and what was got.
void check_batch(const StepBatch& batch, const BatchLimits& limits);

}  // namespace refit
