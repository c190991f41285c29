// Finds the GPUs of this machine and explains why one cannot be used. Functions of their own write the texts, so that
// tests need no GPU.
#pragma once
#include <string>
#include <vector>

#include "core/library/cuda_gpus.h"

namespace refit::cuda {

// Everything that `refit devices` prints. Creates a context for a moment on each GPU that has none.
CudaGpus find_gpus();

// Call it before the library's first CUDA call: it makes CUDA load all kernels at the start. A kernel that is loaded
// at its first launch could wait for a GPU that spins in a collective.
void prepare_runtime();

// Returns the number of GPUs. Throws std::runtime_error with the reason if no GPU can be used: no driver, a driver
// that is too old, all GPUs hidden.
int count_gpus();
// Throws std::invalid_argument if this library's kernels do not run on a GPU of this capability.
void check_capability(const std::string& gpu, int major, int minor);

// --- facts and texts that can be tested without a GPU

// Explains the results of cudaDriverGetVersion, cudaGetDeviceCount and the environment; empty if GPUs are there.
// `status` is a cudaError_t; versions are numbers as in CUDA (13000).
std::string why_no_gpus(int status, int count, int driver, int runtime, const std::string& kernel_driver,
                        const char* visible);
// "580.65.06" from the text of /proc/driver/nvidia/version; empty if there is none.
std::string parse_driver_version(const std::string& text);
// "13.0" from 13000.
std::string cuda_version(int number);
// `list` has CMake's form, such as "80-real,90"; a name without -real contains PTX too.
bool covers(const std::string& list, int major, int minor);
// "80, 90, 90 (PTX)" from "80-real,90".
std::string describe_architectures(const std::string& list);

}  // namespace refit::cuda
