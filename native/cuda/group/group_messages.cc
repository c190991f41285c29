#include "cuda/group/group_messages.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace refit::cuda {
namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Some programs print UUIDs without "GPU-", or in capitals.
std::string plain_uuid(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text.rfind("gpu-", 0) == 0) text.erase(0, 4);
  return text;
}

}  // namespace

std::optional<GroupErrorKind> refusal_of(const std::string& message) {
  if (has(message, "Duplicate GPU")) return GroupErrorKind::kSharedGpu;
  if (has(message, "ismatched NCCL version") || has(message, "version mismatch")) return GroupErrorKind::kNcclVersion;
  return std::nullopt;
}

void check_group_gpus(const std::vector<std::string>& gpus, const NcclGroupOptions& options) {
  const auto refuse = [](const std::string& why) {
    throw GroupError(GroupErrorKind::kSharedGpu, "NCCL takes one rank for each GPU, but " + why);
  };
  std::map<std::string, size_t> taken;
  for (size_t rank = 0; rank < gpus.size(); rank++) {
    if (options.core_rank >= 0 && static_cast<size_t>(options.core_rank) != rank) continue;
    const std::string who = "tensor-parallel rank " + std::to_string(rank);
    const auto [other, fresh] = taken.emplace(plain_uuid(gpus[rank]), rank);
    if (!fresh) {
      refuse(who + " and rank " + std::to_string(other->second) + " share " + gpus[rank]);
    }
    for (const std::string& peer : options.peer_gpus) {
      if (plain_uuid(peer) != other->first) continue;
      refuse(who + " and the trainer share " + gpus[rank]);
    }
  }
}

}  // namespace refit::cuda
