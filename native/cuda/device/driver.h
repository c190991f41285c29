// The few functions of the driver (libcuda) that the runtime does not offer. They are found through the runtime, so
// nothing links against libcuda.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>

#include "cuda/device/check.h"

namespace refit::cuda {

struct Driver {
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDevicePrimaryCtxGetState_v7000 primary_context_state;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuMemAddressReserve_v10020 address_reserve;
  PFN_cuMemAddressFree_v10020 address_free;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuStreamWriteValue32_v11070 stream_write;
  PFN_cuTensorMapEncodeTiled_v12000 encode_tiled;

  // Memory and events of other processes. The runtime has these too, but its errors stay behind for later checks.
  PFN_cuCtxGetCurrent_v4000 current_context;
  PFN_cuCtxPushCurrent_v4000 push_context;
  PFN_cuCtxPopCurrent_v4000 pop_context;
  PFN_cuIpcOpenMemHandle_v11000 ipc_open;
  PFN_cuIpcCloseMemHandle_v4010 ipc_close;
  PFN_cuMemImportFromShareableHandle_v10020 import;
  PFN_cuMemGetAddressRange_v3020 address_range;
  PFN_cuIpcOpenEventHandle_v4010 ipc_open_event;
  PFN_cuEventQuery_v2000 event_query;
  PFN_cuEventDestroy_v4000 event_destroy;
};

// Throws CudaError if the driver lacks one of them.
const Driver& driver();

// Driver and runtime number their errors the same way.
inline void check(CUresult code, const char* operation) { check(static_cast<cudaError_t>(code), operation); }

// An attribute of a GPU, by runtime ordinal.
int device_attribute(int device, CUdevice_attribute attribute);

// Makes a GPU current for a scope. It leaves a GPU alone that is current already, because setting a GPU creates its
// context, and a thread that never set one counts as on GPU 0.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

}  // namespace refit::cuda
