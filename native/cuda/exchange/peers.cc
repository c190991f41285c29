#include "cuda/exchange/peers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/device/check.h"
#include "cuda/device/environment.h"
#include "cuda/device/gpus.h"

namespace refit::cuda {
namespace {

constexpr const char* kNoPeers = "REFIT_CUDA_NO_PEERS";

}  // namespace

std::vector<int> choose_gpus(const CoreConfig& config, int count, bool share) {
  std::vector<int> gpus = config.gpus;
  share = share || config.share_gpus;
  if (gpus.empty()) {
    if (config.ranks > count && !share) {
      throw std::invalid_argument(std::to_string(config.ranks) +
                                  " tensor-parallel ranks need as many GPUs, but there " +
                                  (count == 1 ? "is 1" : "are " + std::to_string(count)) +
                                  ": use fewer ranks, or look at CUDA_VISIBLE_DEVICES");
    }
    for (int r = 0; r < config.ranks; r++) gpus.push_back(r % count);
  }
  if (static_cast<int>(gpus.size()) != config.ranks) {
    throw std::invalid_argument("config.gpus: expected one GPU for each of " + std::to_string(config.ranks) +
                                " ranks, got " + std::to_string(gpus.size()));
  }
  for (const int gpu : gpus) {
    if (gpu >= 0 && gpu < count) continue;
    throw std::invalid_argument("there is no GPU " + std::to_string(gpu) + ": " +
                                (count == 1 ? "the only one is 0" : "they are 0 to " + std::to_string(count - 1)) +
                                " (\"refit devices\" lists them; CUDA_VISIBLE_DEVICES changes their numbers)");
  }
  for (size_t r = 0; r < gpus.size() && !share; r++) {
    if (std::count(gpus.begin(), gpus.end(), gpus[r]) == 1) continue;
    throw std::invalid_argument("GPU " + std::to_string(gpus[r]) +
                                " is named for several ranks: give each rank a GPU of its own (for tests, "
                                "REFIT_CUDA_SHARE_CARD=1 allows it)");
  }
  return gpus;
}

bool reaches(int from, int to) {
  if (from == to) return true;
  if (switched_on(kNoPeers)) return false;
  prepare_runtime();  // this may be the first call of CUDA: the memory is planned before the engine starts
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
  return can != 0;
}

std::string why_nccl(const std::vector<int>& gpus) {
  std::string why;
  if (gpus.size() > 1 && switched_on(kNoPeers)) why = std::string(kNoPeers) + " is set";
  for (const int from : gpus) {
    for (const int to : gpus) {
      if (!why.empty() || reaches(from, to)) continue;
      why = "GPU " + std::to_string(from) + " cannot reach the memory of GPU " + std::to_string(to);
    }
  }
  if (why.empty()) return why;
  for (const int gpu : gpus) {
    if (std::count(gpus.begin(), gpus.end(), gpu) == 1) continue;
    throw std::invalid_argument(
        "several ranks share GPU " + std::to_string(gpu) +
        " (REFIT_CUDA_SHARE_CARD), but NCCL, which takes one rank for each GPU, would have to connect "
        "them (" +
        why + "): give each rank a GPU of its own, or unset one of the two variables");
  }
  return why;
}

void enable_peers(Rank& rank, const std::vector<int>& gpus) {
  for (const int other : gpus) {
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
