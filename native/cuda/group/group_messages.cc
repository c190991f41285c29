#include "cuda/group/group_messages.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace refit::cuda {
namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Some print UUIDs without "GPU-", or in capitals.
std::string plain_uuid(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text.rfind("gpu-", 0) == 0) text.erase(0, 4);
  return text;
}

}  // namespace

std::string cure_of(const std::string& said) {
  if (has(said, "Duplicate GPU")) {
    return "; NCCL takes one rank a GPU: where trainer and engine share a GPU, use /update_weights_from_tensor";
  }
  if (has(said, "ismatched NCCL version") || has(said, "version mismatch")) {
    return "; all ranks need the same version: name the trainer's file in --nccl-path or REFIT_NCCL";
  }
  return "";
}

void check_group_gpus(const std::vector<std::string>& gpus, const NcclGroupOptions& options) {
  const auto refuse = [](const std::string& why) {
    throw GroupError(GroupErrorKind::kRefused, "NCCL takes one rank a GPU, but " + why);
  };
  std::map<std::string, size_t> taken;
  for (size_t rank = 0; rank < gpus.size(); rank++) {
    if (options.core_rank >= 0 && static_cast<size_t>(options.core_rank) != rank) continue;
    const std::string who = "tensor-parallel rank " + std::to_string(rank);
    const auto [other, fresh] = taken.emplace(plain_uuid(gpus[rank]), rank);
    if (!fresh) {
      refuse(who + " and rank " + std::to_string(other->second) + " share " + gpus[rank] +
             ": use /update_weights_from_tensor, or backend \"gloo\"");
    }
    for (const std::string& peer : options.peer_gpus) {
      if (plain_uuid(peer) != other->first) continue;
      refuse(who + " and the trainer share " + gpus[rank] + ": use /update_weights_from_tensor");
    }
  }
}

}  // namespace refit::cuda
