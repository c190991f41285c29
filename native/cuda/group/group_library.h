// The NCCL of a process group. Both functions throw GroupError (kRefused).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/group/nccl_api.h"

namespace refit::cuda {

// `library`: its file; empty: where it is found.
const NcclApi& open_group_library(const std::string& library);

// For a group in which a rank of this process is the first.
std::vector<uint8_t> nccl_group_id(const std::string& library);

}  // namespace refit::cuda
