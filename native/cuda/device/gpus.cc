#include "cuda/device/gpus.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "cuda/device/driver.h"
#include "cuda/device/dynamic.h"
#include "cuda/device/uuid.h"
#include "cuda/group/nccl_api.h"

// CMake passes the list; see native/cuda/CMakeLists.txt.
#ifndef REFIT_CUDA_ARCHS
#define REFIT_CUDA_ARCHS "90-real"
#endif

namespace refit::cuda {
namespace {

// The oldest driver for each major version of CUDA that the library can be built with (CUDA's table of minor version
// compatibility).
const char* least_driver(int runtime) { return runtime >= 13000 ? "580" : "525"; }

struct Target {
  int capability;  // 90 for 9.0
  bool code, ptx;
};

std::vector<Target> targets(const std::string& list) {
  std::vector<Target> out;
  std::stringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');) {
    const int capability = std::atoi(item.c_str());
    if (capability == 0) continue;
    const bool real = item.find("-real") != std::string::npos, ptx = item.find("-virtual") != std::string::npos;
    out.push_back({capability, !ptx, !real});
  }
  return out;
}

std::string read_text(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string bus_id(int device) {
  char text[32] = {};
  check(cudaDeviceGetPCIBusId(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  std::string id = text;
  std::transform(id.begin(), id.end(), id.begin(), [](unsigned char c) { return std::tolower(c); });
  return id;
}

CudaGpu describe(int device) {
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
  CudaGpu gpu;
  gpu.ordinal = device;
  gpu.name = prop.name;
  gpu.uuid = uuid_text(prop.uuid);
  gpu.pci_bus_id = bus_id(device);
  gpu.compute_capability = std::to_string(prop.major) + "." + std::to_string(prop.minor);
  gpu.multiprocessors = prop.multiProcessorCount;
  gpu.total_bytes = prop.totalGlobalMem;
  gpu.integrated = prop.integrated != 0;
  gpu.virtual_memory = device_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  try {
    check_capability(gpu.name, prop.major, prop.minor);
  } catch (const std::invalid_argument& e) {
    gpu.error = e.what();
  }
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet");
  unsigned flags = 0;
  int active = 0;
  check(driver().primary_context_state(handle, &flags, &active), "cuDevicePrimaryCtxGetState");
  const cudaError_t set = cudaSetDevice(device);
  size_t free = 0, total = 0;
  const cudaError_t got = set == cudaSuccess ? cudaMemGetInfo(&free, &total) : set;
  if (got == cudaSuccess) {
    gpu.free_bytes = free;
    gpu.total_bytes = total;
  } else if (gpu.error.empty()) {
    cudaGetLastError();
    gpu.error = gpu.name + " cannot be used: " + cudaGetErrorName(got) + " (" + cudaGetErrorString(got) + ")";
  }
  // This context does not belong to the engine: looking at a GPU must not keep hundreds of megabytes.
  if (active == 0 && set == cudaSuccess) cudaDeviceReset();
  return gpu;
}

}  // namespace

void prepare_runtime() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("CUDA_MODULE_LOADING", "EAGER", 1); });
}

std::string cuda_version(int number) {
  return number <= 0 ? "" : std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string parse_driver_version(const std::string& text) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...": the first word of digits and dots.
  std::stringstream line(text.substr(0, text.find('\n')));
  for (std::string word; line >> word;) {
    const bool digits =
        std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) || c == '.'; });
    if (digits && word.find('.') != std::string::npos && std::isdigit(static_cast<unsigned char>(word[0]))) return word;
  }
  return "";
}

bool covers(const std::string& list, int major, int minor) {
  const int capability = major * 10 + minor;
  for (const Target& target : targets(list)) {
    // Code runs within its major version, PTX on everything that is newer.
    if (target.code && target.capability / 10 == major && target.capability <= capability) return true;
    if (target.ptx && target.capability <= capability) return true;
  }
  return false;
}

std::string describe_architectures(const std::string& list) {
  std::string code, ptx;
  for (const Target& target : targets(list)) {
    const std::string number = std::to_string(target.capability);
    if (target.code) code += (code.empty() ? "" : ", ") + number;
    if (target.ptx) ptx += (ptx.empty() ? "" : ", ") + number + " (PTX)";
  }
  return code + (code.empty() || ptx.empty() ? "" : ", ") + ptx;
}

std::string why_no_gpus(int status, int count, int driver, int runtime, const std::string& kernel_driver,
                        const char* visible) {
  if (status == cudaSuccess && count > 0) return "";
  const std::string needs = std::string("refit's CUDA library needs driver ") + least_driver(runtime) +
                            " or newer (CUDA " + cuda_version(runtime / 1000 * 1000) + ")";
  if (driver == 0) {
    if (kernel_driver.empty()) {
      return "there is no NVIDIA driver on this machine (libcuda.so.1 was not found): install one, or give the "
             "container its GPUs (in Docker: the \"gpus\" option); " +
             needs;
    }
    return "driver " + kernel_driver +
           " is loaded but its library libcuda.so.1 was not found: give the container its GPUs (in Docker: the "
           "\"gpus\" "
           "option and the NVIDIA Container Toolkit), or install the driver's libraries";
  }
  if (driver < runtime / 1000 * 1000 || status == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver is too old: " + (kernel_driver.empty() ? std::string("it") : kernel_driver) +
           " knows CUDA " + cuda_version(driver) + ", but " + needs +
           ": update the driver, or build the library with an older CUDA toolkit";
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    if (visible != nullptr) {
      return std::string("CUDA_VISIBLE_DEVICES=\"") + visible +
             "\" hides all GPUs: name GPUs that exist by index or UUID (nvidia-smi -L lists them), or unset it";
    }
    return "the NVIDIA driver sees no GPU: look at nvidia-smi, and in a container at its device permissions";
  }
  const cudaError_t code = static_cast<cudaError_t>(status);
  return std::string("CUDA cannot be started: ") + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) +
         "); look at nvidia-smi and dmesg";
}

int count_gpus() {
  prepare_runtime();
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  const std::string why =
      why_no_gpus(status, count, driver, runtime, parse_driver_version(read_text("/proc/driver/nvidia/version")),
                  std::getenv("CUDA_VISIBLE_DEVICES"));
  if (!why.empty()) throw std::runtime_error(why);
  return count;
}

void check_capability(const std::string& gpu, int major, int minor) {
  if (covers(REFIT_CUDA_ARCHS, major, minor)) return;
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  if (major < 8) {
    throw std::invalid_argument(gpu + " has compute capability " + capability +
                                ", refit needs 8.0 (Ampere) or newer: older GPUs have no bfloat16");
  }
  throw std::invalid_argument(
      gpu + " has compute capability " + capability + ", but this library has kernels for " +
      describe_architectures(REFIT_CUDA_ARCHS) +
      ": build it on this machine, or with REFIT_CUDA_ARCHS=" + std::to_string(major * 10 + minor));
}

CudaGpus find_gpus() {
  CudaGpus out;
  int driver = 0, runtime = 0;
  prepare_runtime();
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  out.driver_cuda = cuda_version(driver);
  out.runtime_cuda = cuda_version(runtime);
  out.driver_version = parse_driver_version(read_text("/proc/driver/nvidia/version"));
  out.architectures = describe_architectures(REFIT_CUDA_ARCHS);
  for (const LibraryVersion& found : {find_cublas_lt(), find_nccl()}) {
    out.libraries.push_back({found.name, found.path, found.version, found.tried});
  }
  try {
    const int count = count_gpus();
    for (int device = 0; device < count; device++) out.gpus.push_back(describe(device));
    for (int from = 0; from < count; from++) {
      for (int to = 0; to < count; to++) {
        int can = from == to;
        if (from != to) check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
        out.peer_access.push_back(can != 0);
      }
    }
  } catch (const std::exception& e) {
    out.error = e.what();
    out.gpus.clear();
    out.peer_access.clear();
  }
  return out;
}

}  // namespace refit::cuda
