// The GPUs of this machine and why one cannot be used, in words. The texts are made by functions of their own, so that
// they can be tested where there is no GPU.
#pragma once
#include <string>
#include <vector>

#include "core/library/cuda_gpus.h"

namespace refit::cuda {

// Everything that `refit devices` prints. Creates a context on each GPU for a moment, where there is none.
CudaGpus find_gpus();

// Before the first CUDA call of the library: all kernels are loaded at the start. A kernel that were loaded at its
// first launch could wait for a GPU that spins in a collective.
void prepare_runtime();

// Throws std::runtime_error in words where no GPU can be used: no driver, one that is too old, all GPUs hidden.
// Returns how many there are.
int count_gpus();
// Throws std::invalid_argument where the kernels of this library do not run on a GPU of this capability.
void check_capability(const std::string& gpu, int major, int minor);

// --- facts and texts, testable anywhere

// What cudaDriverGetVersion, cudaGetDeviceCount and the environment gave; empty where GPUs are there.
// `status` is a cudaError_t; versions are as CUDA numbers them (13000).
std::string why_no_gpus(int status, int count, int driver, int runtime, const std::string& kernel_driver,
                        const char* visible);
// "580.65.06" of the text of /proc/driver/nvidia/version; empty where there is none.
std::string parse_driver_version(const std::string& text);
// "13.0" of 13000.
std::string cuda_version(int number);
// `list` as CMake names architectures: "80-real,90" (a name without -real has PTX too).
bool covers(const std::string& list, int major, int minor);
// "80, 90, 90 (PTX)" of "80-real,90".
std::string describe_architectures(const std::string& list);

}  // namespace refit::cuda
