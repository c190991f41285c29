// Reasons why ranks cannot form one group, known before or reported by NCCL. Works without a GPU.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "transport/nccl/nccl_group.h"

namespace refit::cuda {

// Reads NCCL's message about ranks that have met and cannot form a group; empty for any other message.
std::optional<GroupErrorKind> refusal_of(const std::string& message);

// `gpus`: the UUID of each tensor-parallel rank's GPU. NCCL refuses two ranks on one GPU, but only after all ranks have
// joined, so this refuses what is known before. Throws GroupError (kSharedGpu).
void check_group_gpus(const std::vector<std::string>& gpus, const NcclGroupOptions& options);

}  // namespace refit::cuda
