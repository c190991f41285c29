#pragma once
#include <cstdint>
#include <string>

namespace refit::cuda {

// Bytes that this process can still be given without swapping: the system's, or its control group's where that is less.
// `root`: for tests, a folder in the place of /.
uint64_t available_host_bytes(const std::string& root = "");

}  // namespace refit::cuda
