#include "transport/ipc/ipc_messages.h"

namespace refit::ipc {
namespace {

constexpr const char* kNamespaces =
    "a sender in another container must share this one's IPC and PID namespaces (--ipc=host --pid=host for both)";

std::string cure(const Refused& refused, const Segment& segment) {
  switch (refused.cause) {
    case Cause::kGone:
      return std::string("the sender has freed it or has ended, and it must keep its tensors until the reply; ") +
             kNamespaces;
    case Cause::kSameProcess:
      return "it was exported by this same process, and CUDA opens handles only in another one: run trainer and engine "
             "in two processes";
    case Cause::kNotVisible:
      return "the sender's GPU " + segment.uuid +
             " is not visible to this process: start it with a CUDA_VISIBLE_DEVICES that has this GPU too, or send "
             "from a GPU of the engine";
    case Cause::kNoPeer:
      return "the rank's GPU does not reach the memory of the sender's GPU " + segment.uuid +
             " (\"refit devices\" shows which GPUs reach which): send from a GPU of the engine, or upload the "
             "weights";
    case Cause::kNoMemory:
      return "there is no room left to map it: send fewer tensors in one request";
    case Cause::kNotSupported:
      return "this memory or this machine cannot share between processes (memory of cudaMallocAsync, MIG, WSL): use "
             "torch's own allocator (PYTORCH_CUDA_ALLOC_CONF without backend:cudaMallocAsync), or upload the weights";
    case Cause::kUnknown:
      break;
  }
  return std::string("the sender may have freed it, or have ended; ") + kNamespaces +
         "; memory of cudaMallocAsync cannot be shared (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync)";
}

}  // namespace

std::string cannot_open(const Refused& refused, const Segment& segment) {
  return std::string("its CUDA memory cannot be opened: ") + refused.what() + ": " + cure(refused, segment);
}

std::string cannot_open_event(const Refused& refused) {
  return std::string("the CUDA event that its sender recorded cannot be waited for: ") + refused.what() +
         ": the sender has freed its tensors or has ended, and it must keep them until the reply; " + kNamespaces;
}

std::string too_short(uint64_t end, uint64_t bytes) {
  return "it ends at byte " + std::to_string(end) + " of its CUDA memory, which has " + std::to_string(bytes) +
         ": its offset, shape or strides do not belong to the handle";
}

}  // namespace refit::ipc
