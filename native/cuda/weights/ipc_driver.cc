#include "cuda/weights/ipc_driver.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "cuda/device/gpus.h"
#include "cuda/device/uuid.h"
#include "cuda/exchange/peers.h"

namespace refit::cuda {
namespace {

using ipc::Cause;
using ipc::Mapping;
using ipc::Refused;

void require_success(CUresult code, const char* operation, bool visible = true) {
  if (code == CUDA_SUCCESS) return;
  throw Refused(cause_of(code, visible), CudaError(static_cast<cudaError_t>(code), operation).what());
}

// Makes a rank's context current for a scope, on any thread, and then restores the thread's own context or none.
// cudaSetDevice cannot restore it: it would give a thread without a context one on GPU 0.
class InContext {
 public:
  explicit InContext(CUcontext context) { require_success(driver().push_context(context), "cuCtxPushCurrent"); }
  ~InContext() {
    CUcontext own = nullptr;
    driver().pop_context(&own);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
};

void set_access(CUdeviceptr base, uint64_t bytes, int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  const CUresult code = driver().set_access(base, bytes, &access, 1);
  if (code != CUDA_ERROR_INVALID_VALUE && code != CUDA_ERROR_NOT_SUPPORTED)
    return require_success(code, "cuMemSetAccess");
  // Some drivers do not support read-only mappings.
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  require_success(driver().set_access(base, bytes, &access, 1), "cuMemSetAccess");
}

CUevent event_of(uint64_t event) { return reinterpret_cast<CUevent>(event); }

// Opens and closes of other processes' memory run one after another, whatever the context: two threads that open one
// handle in one context at the same time (ranks that share a GPU) may get CUDA_ERROR_ALREADY_MAPPED. The driver
// serializes them anyway, so more threads were no faster.
std::mutex opening;

}  // namespace

ipc::Cause cause_of(CUresult code, bool visible) {
  switch (code) {
    case CUDA_ERROR_INVALID_CONTEXT:
      return Cause::kSameProcess;
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_TOO_MANY_PEERS:
      return Cause::kNoPeer;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return Cause::kNoMemory;
    case CUDA_ERROR_NOT_SUPPORTED:
      return Cause::kNotSupported;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
      return Cause::kNotVisible;
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_MAP_FAILED:
    case CUDA_ERROR_NOT_FOUND:
      return visible ? Cause::kGone : Cause::kNotVisible;
    default:
      return visible ? Cause::kUnknown : Cause::kNotVisible;
  }
}

GpuIpc::GpuIpc(std::vector<std::unique_ptr<Rank>>& ranks) : ranks_(ranks), contexts_(ranks.size()) {
  on_all(ranks_, [this](Rank& rank) {
    check(driver().current_context(&contexts_[static_cast<size_t>(rank.index)]), "cuCtxGetCurrent");
  });
  const int count = count_gpus();
  for (int gpu = 0; gpu < count; gpu++) {
    cudaDeviceProp prop;
    check(cudaGetDeviceProperties(&prop, gpu), "cudaGetDeviceProperties");
    gpus_.push_back(uuid_text(prop.uuid));
  }
}

ipc::Mapping GpuIpc::open(int rank, const Segment& segment) {
  const InContext current(contexts_[static_cast<size_t>(rank)]);
  const int device = ranks_[static_cast<size_t>(rank)]->device;
  // A GPU that this process does not see may still be reachable, so the driver decides.
  const auto found = std::find(gpus_.begin(), gpus_.end(), segment.uuid);
  const bool visible = found != gpus_.end() || segment.uuid.empty();
  if (found != gpus_.end() && !reaches(device, static_cast<int>(found - gpus_.begin()))) {
    throw Refused(Cause::kNoPeer, "GPU " + std::to_string(device) + " has no peer access to GPU " +
                                      std::to_string(found - gpus_.begin()));
  }
  return segment.handle.empty() ? open_blocks(device, segment, visible) : open_handle(segment, visible);
}

ipc::Mapping GpuIpc::open_handle(const Segment& segment, bool visible) {
  CUipcMemHandle handle{};
  static_assert(sizeof handle == Segment::kHandleBytes);
  std::memcpy(&handle, segment.handle.data(), sizeof handle);
  CUdeviceptr address = 0;
  const std::lock_guard lock(opening);
  require_success(driver().ipc_open(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle",
                  visible);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult code = driver().address_range(&base, &bytes, address);
  if (code != CUDA_SUCCESS) {
    driver().ipc_close(address);
    require_success(code, "cuMemGetAddressRange");
  }
  return {address, base + bytes - address, false};
}

ipc::Mapping GpuIpc::open_blocks(int device, const Segment& segment, bool visible) {
  const std::lock_guard lock(opening);
  const uint64_t block = segment.block_bytes;
  const uint64_t bytes = block * segment.blocks();
  CUdeviceptr base = 0;
  require_success(driver().address_reserve(&base, bytes, 0, 0, 0), "cuMemAddressReserve");
  uint64_t mapped = 0;
  try {
    for (size_t i = 0; i < segment.blocks(); i++) {
      CUmemGenericAllocationHandle memory = 0;
      if (segment.fds.empty()) {
        CUmemFabricHandle fabric{};
        static_assert(sizeof fabric == Segment::kHandleBytes);
        std::memcpy(&fabric, segment.fabric.data() + i * sizeof fabric, sizeof fabric);
        require_success(driver().import(&memory, &fabric, CU_MEM_HANDLE_TYPE_FABRIC),
                        "cuMemImportFromShareableHandle(fabric handle)", visible);
      } else {
        void* const fd = reinterpret_cast<void*>(static_cast<uintptr_t>(segment.fds[i]));
        require_success(driver().import(&memory, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                        "cuMemImportFromShareableHandle(descriptor)", visible);
      }
      const CUresult code = driver().map(base + i * block, block, 0, memory, 0);
      // The mapping alone keeps the memory.
      driver().release(memory);
      require_success(code, "cuMemMap");
      mapped += block;
    }
    set_access(base, bytes, device);
  } catch (...) {
    if (mapped > 0) driver().unmap(base, mapped);
    driver().address_free(base, bytes);
    throw;
  }
  return {base, bytes, true};
}

int GpuIpc::nearest(const std::string& uuid) const {
  for (const auto& rank : ranks_) {
    if (gpus_.at(static_cast<size_t>(rank->device)) == uuid) return rank->index;
  }
  return 0;
}

void GpuIpc::close(int rank, const ipc::Mapping& mapping) {
  const InContext current(contexts_[static_cast<size_t>(rank)]);
  const std::lock_guard lock(opening);
  if (!mapping.blocks) {
    return require_success(driver().ipc_close(mapping.base), "cuIpcCloseMemHandle");
  }
  require_success(driver().unmap(mapping.base, mapping.bytes), "cuMemUnmap");
  require_success(driver().address_free(mapping.base, mapping.bytes), "cuMemAddressFree");
}

uint64_t GpuIpc::open_event(int rank, const uint8_t* bytes) {
  const InContext current(contexts_[static_cast<size_t>(rank)]);
  CUipcEventHandle handle{};
  static_assert(sizeof handle == Segment::kHandleBytes);
  std::memcpy(&handle, bytes, sizeof handle);
  CUevent event = nullptr;
  const std::lock_guard lock(opening);
  require_success(driver().ipc_open_event(&event, handle), "cuIpcOpenEventHandle");
  return reinterpret_cast<uint64_t>(event);
}

// The host polls the event, and no stream waits for it: a stream of one GPU that waited for an event of another process
// on another GPU ended this process in a segmentation fault inside the driver (580.159).
bool GpuIpc::event_done(int rank, uint64_t event) {
  const InContext current(contexts_[static_cast<size_t>(rank)]);
  const CUresult code = driver().event_query(event_of(event));
  if (code == CUDA_ERROR_NOT_READY) return false;
  require_success(code, "cuEventQuery");
  return true;
}

void GpuIpc::close_event(int rank, uint64_t event) {
  const InContext current(contexts_[static_cast<size_t>(rank)]);
  const std::lock_guard lock(opening);
  require_success(driver().event_destroy(event_of(event)), "cuEventDestroy");
}

}  // namespace refit::cuda
