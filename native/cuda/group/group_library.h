// Opens NCCL for a process group. Both functions throw GroupError (kRefused).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/group/nccl_api.h"

namespace refit::cuda {

// `library`: its file; if empty, the usual places are searched.
const NcclApi& open_group_library(const std::string& library);

// The id of a new group whose first rank is in this process.
std::vector<uint8_t> nccl_group_id(const std::string& library);

}  // namespace refit::cuda
