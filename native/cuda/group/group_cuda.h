// Cards of a CUDA device as process groups use them.
#pragma once
#include <memory>
#include <string>

#include "cuda/group/group_card.h"

namespace refit::cuda {

// A thread, streams and events of its own on the card, for tensor-parallel rank `rank`. It allocates: no rank may run a
// step meanwhile. Throws CudaError, DeviceLost.
std::unique_ptr<GroupCard> open_group_card(int rank, int device);

}  // namespace refit::cuda
