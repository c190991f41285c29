// Chooses the GPUs of an engine's ranks and checks that they reach each other's memory.
#pragma once
#include <string>
#include <vector>

#include "core/model.h"
#include "cuda/device/rank.h"

namespace refit::cuda {

// The GPU of each rank, out of `count`. Throws std::invalid_argument with the reason: too few GPUs, a GPU that does
// not exist, a GPU that is named twice (unless config.share_gpus or `share`).
std::vector<int> choose_gpus(const CoreConfig& config, int count, bool share);

// Whether one GPU reads and writes the other's memory. REFIT_CUDA_NO_PEERS=1 makes it false for two GPUs, to test NCCL
// on machines where all GPUs reach each other. Throws CudaError.
bool reaches(int from, int to);

// The reason why ranks on these GPUs must exchange through NCCL ("GPU 0 cannot reach the memory of GPU 1"); empty if
// all reach each other. Throws std::invalid_argument if they need NCCL but share a GPU: NCCL takes one rank for each
// GPU.
std::string why_nccl(const std::vector<int>& gpus);

// On the rank's thread. Enables access to all other GPUs, which must reach each other.
void enable_peers(Rank& rank, const std::vector<int>& gpus);

}  // namespace refit::cuda
