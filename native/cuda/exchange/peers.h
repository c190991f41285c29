// Which GPUs an engine's ranks are on, and that these reach each other's memory.
#pragma once
#include <string>
#include <vector>

#include "core/model.h"
#include "cuda/device/rank.h"

namespace refit::cuda {

// The GPU of each rank, out of `count`. Throws std::invalid_argument in words: too few GPUs, one that is not there,
// one named twice (unless config.share_gpus or `share`).
std::vector<int> choose_gpus(const CoreConfig& config, int count, bool share);

// Whether the one GPU reads and writes the other's memory. Never for two GPUs with REFIT_CUDA_NO_PEERS=1, which tests
// the other way on machines where all reach each other. Throws CudaError.
bool reaches(int from, int to);

// Why ranks on these GPUs have to exchange through NCCL, in words ("GPU 0 cannot reach the memory of GPU 1"); empty
// where all reach each other. Throws std::invalid_argument where they have to but share a GPU: NCCL takes one rank a
// GPU.
std::string why_nccl(const std::vector<int>& gpus);

// On the rank's thread, for all other GPUs, which reach each other.
void enable_peers(Rank& rank, const std::vector<int>& gpus);

}  // namespace refit::cuda
