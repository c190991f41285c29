// Finds sequences that begin with the same pages.
#pragma once
#include <cstdint>
#include <vector>

#include "core/step.h"

namespace refit::cuda {

// Decoding sequences whose page tables are equal over the first `keys` keys, a multiple of kPrefixKeys; all of them are
// before each sequence's token.
struct SharedPrefix {
  int64_t keys;
  std::vector<int32_t> sequences;  // ascending, at least 2
};

// Each sequence is in one prefix at most. Prefixes within prefixes are chosen by the reads of keys that they save; a
// member must save more than `cost` of them.
std::vector<SharedPrefix> find_prefixes(const StepBatch& batch, int page_size, int64_t cost);

}  // namespace refit::cuda
