// A WriteJob of src/native/addon.ts as the core wants it.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "binding/napi_setup.h"
#include "core/write/write.h"

namespace refit::binding {

// A job that owns its file descriptors: duplicates, so that closing the caller's during the write cannot let another
// file take the number. And the staging slots that it reads.
struct OwnedJob {
  WriteJob job;
  std::vector<std::shared_ptr<const void>> kept;

  OwnedJob() = default;
  ~OwnedJob();
  OwnedJob(const OwnedJob&) = delete;
  OwnedJob& operator=(const OwnedJob&) = delete;
};

// The bytes of a Uint8Array that another thread is to read while a reference holds the array: throws where they could
// move meanwhile. That the array is detached then cannot be prevented here.
std::span<const uint8_t> fixed_bytes(const Napi::Value& value, const std::string& path);

// Adds the buffers of memory sources to `held`. Fields are checked for type and range, not against each other.
void parse_job(const Napi::Value& value, OwnedJob& out, std::vector<Napi::Reference<Napi::Value>>& held);

// One of its sources, a NativeSource. A segment goes into the job.
Source parse_source(const Napi::Value& value, const std::string& path, OwnedJob& out,
                    std::vector<Napi::Reference<Napi::Value>>& held);

// Float64Array of TENSOR_FIELDS per tensor.
std::vector<Tensor> parse_tensors(const Napi::Value& value, const std::string& name);

// Float64Array of RECT_FIELDS per rectangle.
std::vector<Rect> parse_rects(const Napi::Value& value, const std::string& name);

// Entry i of a Float64Array as an integer in [0, max].
int64_t exact_integer(Napi::Env env, double value, int64_t max, const std::string& name, size_t index,
                      const char* field);

}  // namespace refit::binding
