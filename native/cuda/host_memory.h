#pragma once
#include <cstdint>

namespace refit::cuda {

// Bytes that this process can still be given without swapping: the system's, or its control group's where that is less.
uint64_t available_host_bytes();

}  // namespace refit::cuda
