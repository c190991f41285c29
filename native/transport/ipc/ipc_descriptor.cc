#include "transport/ipc/ipc_descriptor.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

// Linux 5.3 and 5.6: the headers of older systems lack the names. The numbers are those of all architectures.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

namespace refit::ipc {
namespace {

constexpr const char* kUpload = ", or let the trainer set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False";

std::string no_process(int32_t pid) {
  return "there is no process " + std::to_string(pid) +
         ": the sender has ended, or it is in another PID namespace (start both containers with --pid=host)";
}

std::string cure(int error, int32_t pid, int32_t fd) {
  switch (error) {
    case ESRCH:
      return no_process(pid);
    case EBADF:
      return "the process has no descriptor " + std::to_string(fd) +
             ": the sender has freed the memory, or it is in another PID namespace and " + std::to_string(pid) +
             " is another process here (start both containers with --pid=host)";
    case EPERM:
      return std::string(
                 "this process may not trace the sender: both must run as one user, and kernel.yama.ptrace_scope must "
                 "be 0 or this process have CAP_SYS_PTRACE (in a container also --cap-add=SYS_PTRACE, for its seccomp "
                 "profile)") +
             kUpload;
    case ENOSYS:
      return std::string("the kernel is older than Linux 5.6, or a seccomp profile forbids pidfd_getfd") + kUpload;
    case EMFILE:
    case ENFILE:
      return "too many open files: raise the limit (ulimit -n)";
    default:
      return "check that the sender is still running";
  }
}

[[noreturn]] void refuse(const char* call, int error, int32_t pid, int32_t fd) {
  throw std::runtime_error("descriptor " + std::to_string(fd) + " of process " + std::to_string(pid) +
                           " cannot be taken: " + call + ": " + strerror(error) + ": " + cure(error, pid, fd));
}

}  // namespace

int take_descriptor(int32_t pid, int32_t fd) {
  const auto process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  // EINVAL: the number is not valid, or it belongs to a thread and not to a process.
  if (process < 0) refuse("pidfd_open", errno == EINVAL ? ESRCH : errno, pid, fd);
  const auto own = static_cast<int>(syscall(SYS_pidfd_getfd, process, fd, 0));
  const int error = errno;
  close(process);
  // pidfd_getfd sets close-on-exec on the new descriptor.
  if (own < 0) refuse("pidfd_getfd", error, pid, fd);
  return own;
}

}  // namespace refit::ipc
