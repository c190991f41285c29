#pragma once

#include <string>

namespace refit {

// Connects to a Unix socket: a path, or a zero byte and then the name of an abstract socket. The name is passed at its
// own length. (libuv 1.46 of Node 20 pads such names with zeros, which makes them names of another socket.) Does not
// wait or retry. Returns the descriptor, which the caller closes, or a negative errno. The result is also -EACCES if
// the peer belongs to a user other than this one and root.
int connect_local(const std::string& path);

}  // namespace refit
