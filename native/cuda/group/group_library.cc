#include "cuda/group/group_library.h"

#include <stdexcept>

#include "cuda/group/nccl.h"
#include "transport/nccl/nccl_group.h"

namespace refit::cuda {

const NcclApi& open_group_library(const std::string& library) {
  try {
    return open_nccl(library);
  } catch (const std::runtime_error& error) {
    throw GroupError(GroupErrorKind::kRefused,
                     std::string("a group with backend \"nccl\" needs the NCCL of its trainer's torch "
                                 "(site-packages/nvidia/nccl/lib/libnccl.so.2): ") +
                         error.what());
  }
}

std::vector<uint8_t> nccl_group_id(const std::string& library) {
  try {
    const NcclUniqueId id = new_nccl_id(open_group_library(library));
    return {id.bytes, id.bytes + sizeof id.bytes};
  } catch (const NcclError& error) {
    throw GroupError(GroupErrorKind::kRefused, error.what());
  }
}

}  // namespace refit::cuda
