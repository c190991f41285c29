// A file descriptor of another process.
#pragma once
#include <cstdint>

namespace refit::ipc {

// A duplicate of descriptor `fd` of process `pid`, for the caller to close. Throws std::runtime_error: what the system
// said, and what to do about it.
int take_descriptor(int32_t pid, int32_t fd);

}  // namespace refit::ipc
