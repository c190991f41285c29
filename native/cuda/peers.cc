#include "cuda/peers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/check.h"

namespace refit::cuda {

std::vector<int> choose_cards(const CoreConfig& config, int count, bool share) {
  std::vector<int> cards = config.cards;
  share = share || config.share_cards;
  if (cards.empty()) {
    if (config.ranks > count && !share) {
      throw std::invalid_argument("--tp " + std::to_string(config.ranks) + " needs as many cards, but there " +
                                  (count == 1 ? "is 1" : "are " + std::to_string(count)) +
                                  ": lower --tp, or look at CUDA_VISIBLE_DEVICES");
    }
    for (int r = 0; r < config.ranks; r++) cards.push_back(r % count);
  }
  if (static_cast<int>(cards.size()) != config.ranks) {
    throw std::invalid_argument("config.cards: expected one card for each of " + std::to_string(config.ranks) +
                                " ranks, got " + std::to_string(cards.size()));
  }
  for (const int card : cards) {
    if (card >= 0 && card < count) continue;
    throw std::invalid_argument("there is no card " + std::to_string(card) + ": " +
                                (count == 1 ? "the only one is 0" : "they are 0 to " + std::to_string(count - 1)) +
                                " (\"refit devices\" lists them; CUDA_VISIBLE_DEVICES changes their numbers)");
  }
  for (size_t r = 0; r < cards.size() && !share; r++) {
    if (std::count(cards.begin(), cards.end(), cards[r]) == 1) continue;
    throw std::invalid_argument("card " + std::to_string(cards[r]) +
                                " is named for several ranks: give each rank a card of its own (for tests, "
                                "REFIT_CUDA_SHARE_CARD=1 allows it)");
  }
  return cards;
}

void check_peers(const std::vector<int>& cards) {
  for (const int from : cards) {
    for (const int to : cards) {
      if (from == to) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
      if (can != 0) continue;
      throw std::runtime_error("card " + std::to_string(from) + " cannot reach the memory of card " +
                               std::to_string(to) +
                               ", which tensor parallelism needs: choose cards that are connected (\"refit devices\" "
                               "shows peer access), or use --tp 1");
    }
  }
}

void enable_peers(Rank& rank, const std::vector<int>& cards) {
  for (const int other : cards) {
    if (other == rank.device) continue;
    rank.doing("enable peer access");
    const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check(code, "cudaDeviceEnablePeerAccess");
    }
  }
}

}  // namespace refit::cuda
