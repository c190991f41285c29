#pragma once
#include <cstdint>
#include <string>

namespace refit::cuda {

// Bytes that this process can still get without swapping: the smaller of what the system and its control group have
// left. `root`: a folder that replaces / in tests.
uint64_t available_host_bytes(const std::string& root = "");

}  // namespace refit::cuda
