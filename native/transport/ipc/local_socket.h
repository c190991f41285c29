#pragma once

#include <string>

namespace refit {

// Connects to a Unix socket: a path, or the name of an abstract socket behind a zero byte, at its own length
// (libuv 1.46, which Node 20 has, fills such names up with zeros, and means another socket by that). Neither waits nor
// retries. Returns the descriptor, which the caller closes, or a negative errno; -EACCES also for a peer that belongs
// to another user who is not root.
int connect_local(const std::string& path);

}  // namespace refit
