// Kernels and copies of this process with their times, by CUPTI's activity records. The library is opened at run time.
#pragma once
#include <cuda.h>
#include <cupti.h>
#include <glob.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device/dynamic.h"

namespace refit::bench {

// A kernel, copy or fill of memory. Times are nanoseconds of one clock.
struct Activity {
  std::string name;  // mangled
  uint64_t start = 0, end = 0;
  bool is_kernel = false;
};

// One object in a process. Once it is on, every launch takes the host longer, even after it is gone.
class CuptiTrace {
 public:
  // Throws std::runtime_error with the places where the library was looked for.
  CuptiTrace() {
    const cuda::Library library = open();
    find(library, "cuptiActivityEnable", enable_);
    find(library, "cuptiActivityFlushAll", flush_);
    find(library, "cuptiActivityGetNumDroppedRecords", dropped_);
    find(library, "cuptiActivityRegisterCallbacks", register_);
    find(library, "cuptiGetResultString", result_string_);
    find(library, "cuptiActivityGetNextRecord", next_record);
  }

  void start() {
    check(register_(request, complete), "cuptiActivityRegisterCallbacks");
    // Not CUPTI_ACTIVITY_KIND_KERNEL, which lets one kernel run at a time.
    for (const CUpti_ActivityKind kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET}) {
      check(enable_(kind), "cuptiActivityEnable");
    }
  }

  // The activities since the last call, by start. The GPU must have nothing left to do.
  std::vector<Activity> take() {
    check(flush_(0), "cuptiActivityFlushAll");
    size_t dropped = 0;
    check(dropped_(nullptr, 0, &dropped), "cuptiActivityGetNumDroppedRecords");
    if (dropped > 0) throw std::runtime_error("CUPTI dropped " + std::to_string(dropped) + " records");
    const std::lock_guard lock(mutex);
    std::vector<Activity> taken;
    taken.swap(activities);
    for (const Activity& one : taken) {
      if (one.end == 0) throw std::runtime_error("CUPTI could not time " + one.name);
    }
    std::sort(taken.begin(), taken.end(), [](const Activity& a, const Activity& b) { return a.start < b.start; });
    return taken;
  }

 private:
  static constexpr size_t kBufferBytes = size_t{4} << 20, kAlignment = 64;

  static cuda::Library open() {
    const std::vector<std::string> names{"libcupti.so.13", "libcupti.so"};
    cuda::Library library = cuda::open_library(names, nullptr);
    for (const std::string& name : names) {
      glob_t found{};
      if (glob(("/usr/local/cuda*/extras/CUPTI/lib64/" + name).c_str(), 0, nullptr, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc && library.handle == nullptr; ++i) {
          cuda::Library one = cuda::open_library_file(found.gl_pathv[i]);
          one.tried = library.tried + "\n" + one.tried;
          library = one;
        }
      }
      globfree(&found);
    }
    if (library.handle == nullptr) {
      throw std::runtime_error("CUPTI was not found; REFIT_CUDA_LIBS can name its folder. Tried:\n" + library.tried +
                               "\n/usr/local/cuda*/extras/CUPTI/lib64");
    }
    return library;
  }

  template <class Function>
  static void find(const cuda::Library& library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(cuda::symbol(library, name));
    if (function == nullptr) throw std::runtime_error(library.path + " has no " + name);
  }

  void check(CUptiResult result, const char* what) const {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    result_string_(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text == nullptr ? std::to_string(result) : text));
  }

  // CUPTI calls these on threads of its own.
  static void CUPTIAPI request(uint8_t** buffer, size_t* size, size_t* most_records) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, kBufferBytes));
    *size = *buffer == nullptr ? 0 : kBufferBytes;
    *most_records = 0;  // as many as fit
  }
  static void CUPTIAPI complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t bytes) {
    const std::lock_guard lock(mutex);
    CUpti_Activity* record = nullptr;
    while (bytes > 0 && next_record(buffer, bytes, &record) == CUPTI_SUCCESS) add(record);
    std::free(buffer);
  }

  static void add(const CUpti_Activity* record) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* const kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      activities.push_back({kernel->name == nullptr ? "?" : kernel->name, kernel->start, kernel->end, true});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* const copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      activities.push_back({copy_name(copy->copyKind), copy->start, copy->end, false});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* const fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      activities.push_back({"memset", fill->start, fill->end, false});
    }
  }
  static const char* copy_name(uint8_t kind) {
    switch (kind) {
      case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
        return "copy in";
      case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
        return "copy out";
      default:
        return "copy";
    }
  }

  decltype(&cuptiActivityEnable) enable_ = nullptr;
  decltype(&cuptiActivityFlushAll) flush_ = nullptr;
  decltype(&cuptiActivityGetNumDroppedRecords) dropped_ = nullptr;
  decltype(&cuptiActivityRegisterCallbacks) register_ = nullptr;
  decltype(&cuptiGetResultString) result_string_ = nullptr;

  // CUPTI passes nothing of ours to the callbacks.
  static inline decltype(&cuptiActivityGetNextRecord) next_record = nullptr;
  static inline std::mutex mutex;
  static inline std::vector<Activity> activities;
};

}  // namespace refit::bench
