#include "cuda/group/nccl_api.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace refit::cuda {
namespace {

constexpr const char* kSwitch = "REFIT_NCCL";
// 2.14 is the first version with ncclCommInitRankConfig: before it, a rank that waits for others cannot give up.
constexpr int kOldest = 21400, kTooNew = 30000;

// NCCL reads its environment when its first communicator is created. Multicast over NVLink (NVLS) takes memory and
// time at the start and does not make the transfers here faster.
Library find_library() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  return open_library({"libnccl.so.2"}, kSwitch);
}

int version_of(const Library& library) {
  void* const function = symbol(library, "ncclGetVersion");
  int version = 0;
  if (function == nullptr || reinterpret_cast<int (*)(int*)>(function)(&version) != kNcclSuccess) return 0;
  return version;
}

std::unique_ptr<NcclApi> resolve(const Library& library) {
  if (library.handle == nullptr) {
    throw std::runtime_error("NCCL was not found: install it or torch, or name its file in " + std::string(kSwitch) +
                             "; tried\n" + library.tried);
  }
  auto api = std::make_unique<NcclApi>();
  const char* missing = nullptr;
  void* any = nullptr;
  const auto find = [&](auto& function, const char* name) {
    void* const found = symbol(library, name);
    if (found == nullptr && missing == nullptr) missing = name;
    if (found != nullptr) any = found;
    std::memcpy(&function, &found, sizeof found);
  };
  find(api->get_unique_id, "ncclGetUniqueId");
  find(api->init_rank_config, "ncclCommInitRankConfig");
  find(api->finalize, "ncclCommFinalize");
  find(api->abort, "ncclCommAbort");
  find(api->get_async_error, "ncclCommGetAsyncError");
  find(api->get_error_string, "ncclGetErrorString");
  find(api->get_last_error, "ncclGetLastError");
  find(api->group_start, "ncclGroupStart");
  find(api->group_end, "ncclGroupEnd");
  find(api->send, "ncclSend");
  find(api->recv, "ncclRecv");
  find(api->broadcast, "ncclBroadcast");
  find(api->all_reduce, "ncclAllReduce");
  find(api->all_gather, "ncclAllGather");
  api->path = loaded_path(library, any);
  api->version = version_of(library);
  if (api->version == 0) throw std::runtime_error(api->path + " is not NCCL: it reports no version");
  if (api->version < kOldest || api->version >= kTooNew) {
    throw std::runtime_error(api->name() + " (" + api->path +
                             ") is not used: versions from 2.14 on, below 3, are known");
  }
  if (missing != nullptr) {
    throw std::runtime_error(api->name() + " (" + api->path + ") has no function " + missing);
  }
  return api;
}

}  // namespace

std::string nccl_version(int number) {
  const bool five = number >= 10000;
  return std::to_string(number / (five ? 10000 : 1000)) + "." +
         std::to_string(five ? number / 100 % 100 : number / 100 % 10) + "." + std::to_string(number % 100);
}

std::string NcclApi::name() const { return "NCCL " + nccl_version(version); }

NcclConfig nccl_config(int library_version) {
  constexpr int kLayout = 21800;
  NcclConfig config{};
  config.version = static_cast<uint32_t>(library_version < kLayout ? library_version : kLayout);
  config.size = library_version < 21700 ? 24 : library_version < kLayout ? 40 : sizeof config;
  config.magic = 0xcafebeef;
  config.blocking = 0;
  config.cga_cluster_size = config.min_ctas = config.max_ctas = INT_MIN;
  config.net_name = nullptr;
  config.split_share = config.traffic_class = INT_MIN;
  return config;
}

const NcclApi& open_nccl(const std::string& file) {
  static std::mutex mutex;
  // never destroyed, for threads that outlive main
  static auto& opened = *new std::map<std::string, std::unique_ptr<NcclApi>>;
  const std::lock_guard lock(mutex);
  const auto it = opened.find(file);
  if (it != opened.end()) return *it->second;
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  auto api = resolve(file.empty() ? find_library() : open_library_file(file));
  return *opened.emplace(file, std::move(api)).first->second;
}

LibraryVersion find_nccl() {
  const Library library = find_library();
  LibraryVersion out{"NCCL", library.path, "", library.handle == nullptr ? library.tried : ""};
  void* const function = symbol(library, "ncclGetVersion");
  if (function == nullptr) return out;
  out.path = loaded_path(library, function);
  const int version = version_of(library);
  if (version != 0) out.version = nccl_version(version);
  return out;
}

}  // namespace refit::cuda
