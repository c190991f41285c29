// Why ranks cannot be one group, before and after NCCL says so. Plain text, without a GPU.
#pragma once
#include <string>
#include <vector>

#include "transport/nccl/nccl_group.h"

namespace refit::cuda {

// What to do about what NCCL says when ranks have met and do not fit; empty where it says something else.
std::string cure_of(const std::string& said);

// `GPUs`: the UUID of each tensor-parallel rank's. NCCL refuses two ranks on one GPU, but only once all have come:
// what is known before is refused here. Throws GroupError (kRefused).
void check_group_gpus(const std::vector<std::string>& gpus, const NcclGroupOptions& options);

}  // namespace refit::cuda
