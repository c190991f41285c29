#include "cuda/device/driver.h"

namespace refit::cuda {
namespace {

template <typename F>
void find(F& function, const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || address == nullptr) throw CudaError(cudaErrorSymbolNotFound, name);
  function = reinterpret_cast<F>(address);
}

Driver find_all() {
  Driver d{};
  find(d.device_get, "cuDeviceGet", 2000);
  find(d.device_get_attribute, "cuDeviceGetAttribute", 2000);
  find(d.primary_context_state, "cuDevicePrimaryCtxGetState", 7000);
  find(d.granularity, "cuMemGetAllocationGranularity", 10020);
  find(d.address_reserve, "cuMemAddressReserve", 10020);
  find(d.address_free, "cuMemAddressFree", 10020);
  find(d.create, "cuMemCreate", 10020);
  find(d.release, "cuMemRelease", 10020);
  find(d.map, "cuMemMap", 10020);
  find(d.unmap, "cuMemUnmap", 10020);
  find(d.set_access, "cuMemSetAccess", 10020);
  find(d.stream_write, "cuStreamWriteValue32", 11070);
  find(d.encode_tiled, "cuTensorMapEncodeTiled", 12000);
  find(d.current_context, "cuCtxGetCurrent", 4000);
  find(d.push_context, "cuCtxPushCurrent", 4000);
  find(d.pop_context, "cuCtxPopCurrent", 4000);
  find(d.ipc_open, "cuIpcOpenMemHandle", 11000);
  find(d.ipc_close, "cuIpcCloseMemHandle", 4010);
  find(d.import, "cuMemImportFromShareableHandle", 10020);
  find(d.address_range, "cuMemGetAddressRange", 3020);
  find(d.ipc_open_event, "cuIpcOpenEventHandle", 4010);
  find(d.event_query, "cuEventQuery", 2000);
  find(d.event_destroy, "cuEventDestroy", 4000);
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = find_all();
  return instance;
}

int device_attribute(int device, CUdevice_attribute attribute) {
  CUdevice gpu = 0;
  check(driver().device_get(&gpu, device), "cuDeviceGet");
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, gpu), "cuDeviceGetAttribute");
  return value;
}

}  // namespace refit::cuda
