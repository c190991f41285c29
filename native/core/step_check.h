// Checks a step's batch in full before anything is computed, because a wrong batch could overwrite the KV cache of
// running requests.
#pragma once
#include "core/step.h"

namespace refit {

struct BatchLimits {
  int vocab, pages, page_size;
  int adapter_slots = 0;
  int fed_rows = 0;  // rows of the step before, whose tokens this one may take
};

// Throws std::invalid_argument that names the sequence or row, the expected value and the actual one.
void check_batch(const StepBatch& batch, const BatchLimits& limits);

}  // namespace refit
