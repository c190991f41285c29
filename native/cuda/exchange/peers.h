// Which cards an engine's ranks are on, and that these reach each other's memory.
#pragma once
#include <string>
#include <vector>

#include "core/model.h"
#include "cuda/device/rank.h"

namespace refit::cuda {

// The card of each rank, out of `count`. Throws std::invalid_argument in words: too few cards, one that is not there,
// one named twice (unless config.share_cards or `share`).
std::vector<int> choose_cards(const CoreConfig& config, int count, bool share);

// Whether the one card reads and writes the other's memory. Never for two cards with REFIT_CUDA_NO_PEERS=1, which tests
// the other way on machines where all reach each other. Throws CudaError.
bool reaches(int from, int to);

// Why ranks on these cards have to exchange through NCCL, in words ("card 0 cannot reach the memory of card 1"); empty
// where all reach each other. Throws std::invalid_argument where they have to but share a card: NCCL takes one rank a
// card.
std::string why_nccl(const std::vector<int>& cards);

// On the rank's thread, for all other cards, which reach each other.
void enable_peers(Rank& rank, const std::vector<int>& cards);

}  // namespace refit::cuda
