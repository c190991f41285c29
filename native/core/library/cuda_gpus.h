// The CUDA devices and libraries of this machine; the fields are documented in src/native/devices.ts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace refit {

struct CudaGpu {
  int ordinal = 0;
  std::string name, uuid, pci_bus_id, compute_capability;
  int multiprocessors = 0;
  uint64_t total_bytes = 0, free_bytes = 0;
  bool virtual_memory = false;
  bool integrated = false;
  std::string error;  // why this library cannot compute on it
};

struct CudaFoundLibrary {
  std::string name, path, version;
  std::string tried;  // not empty: missing
};

struct CudaGpus {
  std::string error;  // why there are no GPUs; empty otherwise
  std::string driver_cuda, runtime_cuda, driver_version, architectures;
  std::vector<CudaGpu> gpus;
  std::vector<uint8_t> peer_access;  // [GPUs, GPUs]: from, to
  std::vector<CudaFoundLibrary> libraries;
};

// Bytes that one GPU needs.
struct CudaMemoryPlan {
  uint64_t weight_bytes = 0;  // of one set, with the slots of adapters
  uint64_t spare_bytes = 0;   // of the other set, if there is one
  uint64_t kv_bytes = 0, scratch_bytes = 0, fixed_bytes = 0;
};

}  // namespace refit
