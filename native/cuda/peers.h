// Which cards an engine's ranks are on, and that these reach each other's memory.
#pragma once
#include <vector>

#include "core/model.h"
#include "cuda/rank.h"

namespace refit::cuda {

// The card of each rank, out of `count`. Throws std::invalid_argument in words: too few cards, one that is not there,
// one named twice (unless config.share_cards or `share`).
std::vector<int> choose_cards(const CoreConfig& config, int count, bool share);

// Throws std::runtime_error that names two cards which cannot read each other's memory.
void check_peers(const std::vector<int>& cards);

// On the rank's thread, for all other cards.
void enable_peers(Rank& rank, const std::vector<int>& cards);

}  // namespace refit::cuda
