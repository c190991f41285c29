// A file descriptor of another process.
#pragma once
#include <cstdint>

namespace refit::ipc {

// Returns a duplicate of descriptor `fd` of process `pid`, which the caller closes. Throws std::runtime_error with the
// system's error and a way to fix it.
int take_descriptor(int32_t pid, int32_t fd);

}  // namespace refit::ipc
