#include "cuda/exchange/peers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/device/cards.h"
#include "cuda/device/check.h"
#include "cuda/device/environment.h"

namespace refit::cuda {
namespace {

constexpr const char* kNoPeers = "REFIT_CUDA_NO_PEERS";

}  // namespace

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

bool reaches(int from, int to) {
  if (from == to) return true;
  if (switched_on(kNoPeers)) return false;
  prepare_runtime();  // this may be the first call of CUDA: the memory is planned before the engine starts
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
  return can != 0;
}

std::string why_nccl(const std::vector<int>& cards) {
  std::string why;
  if (cards.size() > 1 && switched_on(kNoPeers)) why = std::string(kNoPeers) + " is set";
  for (const int from : cards) {
    for (const int to : cards) {
      if (!why.empty() || reaches(from, to)) continue;
      why = "card " + std::to_string(from) + " cannot reach the memory of card " + std::to_string(to);
    }
  }
  if (why.empty()) return why;
  for (const int card : cards) {
    if (std::count(cards.begin(), cards.end(), card) == 1) continue;
    throw std::invalid_argument(
        "several ranks are to share card " + std::to_string(card) +
        " (REFIT_CUDA_SHARE_CARD), but NCCL, which takes one rank a card, would have to connect "
        "them (" +
        why + "): give each rank a card of its own, or unset one of the two variables");
  }
  return why;
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
