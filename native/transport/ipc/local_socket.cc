#include "transport/ipc/local_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace refit {
namespace {

// The credentials are those of the process that called listen. 0, or a negative errno.
int check_owner(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return -errno;
  return peer.uid == 0 || peer.uid == geteuid() ? 0 : -EACCES;
}

}  // namespace

int connect_local(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const bool abstract = !path.empty() && path[0] == '\0';
  if (path.empty() || path.size() > sizeof address.sun_path - (abstract ? 0 : 1)) return -ENAMETOOLONG;
  if (!abstract && path.find('\0') != std::string::npos) return -EINVAL;
  memcpy(address.sun_path, path.data(), path.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + (abstract ? 0 : 1));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  int result = connect(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 ? 0 : -errno;
  if (result == 0) result = check_owner(fd);
  if (result == 0) return fd;
  close(fd);
  return result;
}

}  // namespace refit
