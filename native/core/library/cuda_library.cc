#include "core/library/cuda_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "core/library/device_library.h"
#include "core/memory_error.h"

namespace refit {
namespace {

constexpr const char* kBuildIt =
    "build it with \"node scripts/build-native.js --cuda\" (it needs nvcc of CUDA 12.8 or newer and CMake), or "
    "name one in REFIT_CUDA_LIBRARY";

// One library for each dtype. A process computes in one dtype, but finds its GPUs by the library for bf16.
struct Opened {
  std::mutex mutex;
  struct {
    void* handle = nullptr;
    const DeviceLibrary* table = nullptr;
  } libraries[kDTypes];
};
Opened& opened() {
  static Opened instance;
  return instance;
}

const DeviceLibrary* open_table(const std::string& path, void*& handle) {
  if (access(path.c_str(), R_OK) != 0) {
    throw std::runtime_error("CUDA: " + path + " does not exist or cannot be read: " + kBuildIt);
  }
  // Local: its symbols must not mix with those of torch or of another copy of the CUDA runtime in this process.
  handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) throw std::runtime_error("CUDA: " + path + " does not open: " + dlerror());
  const auto entry = reinterpret_cast<DeviceLibraryEntry>(dlsym(handle, kDeviceLibraryEntry));
  if (entry == nullptr) throw std::runtime_error("CUDA: " + path + " is not refit's CUDA library: " + kBuildIt);
  const DeviceLibrary* const table = entry();
  if (table->version != kDeviceLibraryVersion || table->bytes != sizeof(DeviceLibrary) ||
      table->layout != device_library_layout()) {
    const std::string how = table->version == kDeviceLibraryVersion
                                ? "the layout of its data differs"
                                : "its interface is " + std::to_string(table->version) + ", expected " +
                                      std::to_string(kDeviceLibraryVersion);
    throw std::runtime_error("CUDA: " + path + " was built from other sources than the addon (" + how +
                             "): " + kBuildIt);
  }
  return table;
}

const DeviceLibrary& table(DType dtype = DType::kBFloat16) {
  if (dtype != DType::kFloat16) dtype = DType::kBFloat16;  // which refuses all others
  Opened& o = opened();
  const std::lock_guard lock(o.mutex);
  auto& library = o.libraries[static_cast<size_t>(dtype)];
  // tried again after a failure
  if (library.table == nullptr) library.table = open_table(cuda_library_path(dtype), library.handle);
  return *library.table;
}

std::string folder_of_addon() {
  Dl_info here;
  std::string path;
  if (dladdr(reinterpret_cast<void*>(&cuda_library_path), &here) != 0 && here.dli_fname != nullptr)
    path = here.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

class LibraryDevice : public Device {
 public:
  explicit LibraryDevice(const CoreConfig& config) : table_(table(config.dtype)) {
    Failure failure;
    device_ = table_.open(config, failure);
    raise(failure);
  }
  ~LibraryDevice() override {
    if (device_ != nullptr) table_.close(device_);
  }
  LibraryDevice(const LibraryDevice&) = delete;
  LibraryDevice& operator=(const LibraryDevice&) = delete;

  DeviceInfo info() const override {
    DeviceInfo out;
    Taken<DeviceInfo> taken(out);
    Failure failure;
    table_.info(*device_, taken.sink(), failure);
    taken.finish(failure);
    return out;
  }
  const void* address(int rank, int param, int set) const override {
    return table_.address(*device_, rank, param, set);
  }
  void begin(const StepBatch& batch) override {
    Failure failure;
    table_.begin(*device_, batch, failure);
    raise(failure);
  }
  void collect(StepResult& result) override {
    Taken<StepResult> taken(result);
    Failure failure;
    table_.collect(*device_, taken.sink(), failure);
    taken.finish(failure);
  }
  WriteOutcome write(const WriteJob& job, Access access) override {
    WriteOutcome out;
    Taken<WriteOutcome> taken(out);
    Failure failure;
    table_.write(*device_, job, access, taken.sink(), failure);
    taken.finish(failure);
    return out;
  }
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
            Access access) override {
    Failure failure;
    table_.read(*device_, rank, param, row, col, rows, cols, out, access, failure);
    raise(failure);
  }
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                 Access access) override {
    std::vector<uint64_t> out;
    Taken<std::vector<uint64_t>> taken(out);
    Failure failure;
    table_.checksum(*device_, rects, tensor_cols, access, taken.sink(), failure);
    taken.finish(failure);
    return out;
  }
  void scramble(uint64_t seed, int set) override {
    Failure failure;
    table_.scramble(*device_, seed, set, failure);
    raise(failure);
  }
  void copy_weights(const std::vector<Rect>& rects, int from, int to) override {
    Failure failure;
    table_.copy_weights(*device_, rects, from, to, failure);
    raise(failure);
  }
  uint64_t drop_set(int set) override {
    uint64_t bytes = 0;
    Failure failure;
    table_.drop_set(*device_, set, bytes, failure);
    raise(failure);
    return bytes;
  }
  void restore_set(int set) override {
    Failure failure;
    table_.restore_set(*device_, set, failure);
    raise(failure);
  }
  uint64_t release_memory(uint32_t tags, bool keep_weights) override {
    uint64_t bytes = 0;
    Failure failure;
    table_.release_memory(*device_, tags, keep_weights, bytes, failure);
    raise(failure);
    return bytes;
  }
  bool resume_memory(uint32_t tags) override {
    bool kept = false;
    Failure failure;
    table_.resume_memory(*device_, tags, kept, failure);
    raise(failure);
    return kept;
  }
  uint64_t close_mappings(const std::string& name, Access access) override {
    uint64_t closed = 0;
    Failure failure;
    table_.close_mappings(*device_, name, access, closed, failure);
    raise(failure);
    return closed;
  }
  void fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) override {
    Failure failure;
    table_.fetch(*device_, segment, offset, bytes, timeout_ms, out, failure);
    raise(failure);
  }
  std::unique_ptr<NcclGroup> nccl_group(const NcclGroupOptions& options) override {
    return open_library_group(table_.groups, *this, *device_, options);
  }

 private:
  const DeviceLibrary& table_;
  Device* device_ = nullptr;
};

}  // namespace

std::string cuda_library_path(DType dtype) {
  std::string path;
  if (const char* named = std::getenv("REFIT_CUDA_LIBRARY"); named != nullptr && *named != 0) {
    path = named;
  } else {
    path = folder_of_addon() + "/librefit_cuda.so";
  }
  if (dtype != DType::kFloat16) return path;
  const size_t end = path.ends_with(".so") ? path.size() - 3 : path.size();
  return path.insert(end, "_fp16");
}

std::unique_ptr<Device> make_cuda_device(const CoreConfig& config) { return std::make_unique<LibraryDevice>(config); }

std::vector<uint8_t> nccl_unique_id(const std::string& library) {
  std::vector<uint8_t> id(NcclGroup::kIdBytes);
  Failure failure;
  table().groups.unique_id(library, id.data(), failure);
  raise(failure);
  return id;
}

CudaMemoryPlan cuda_memory_plan(const CoreConfig& config) {
  CudaMemoryPlan plan;
  Failure failure;
  table(config.dtype).memory_plan(config, plan, failure);
  raise(failure);
  return plan;
}

#ifdef REFIT_FAULTS
void arm_cuda_library(fault::Point point, int64_t at, fault::Action action, int stall_ms) {
  Opened& o = opened();
  const std::lock_guard lock(o.mutex);
  for (const auto& library : o.libraries) {
    if (library.table == nullptr) continue;
    const auto arm = reinterpret_cast<decltype(&fault::arm)>(dlsym(library.handle, "refit_arm_fault"));
    if (arm != nullptr) arm(point, at, action, stall_ms);
  }
}
#endif

CudaGpus cuda_gpus() {
  CudaGpus out;
  try {
    Taken<CudaGpus> taken(out);
    Failure failure;
    table().gpus(taken.sink(), failure);
    taken.finish(failure);
  } catch (const std::exception& e) {
    out.error = e.what();
  }
  return out;
}

}  // namespace refit
