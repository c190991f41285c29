// Parses a WriteJob (src/native/write-job.ts) for the core.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "binding/napi_setup.h"
#include "core/write/write.h"

namespace refit::binding {

// A job that owns its staging slots and its file descriptors. These are duplicates: if the caller closes its own during
// the write, another file cannot take the number.
struct OwnedJob {
  WriteJob job;
  std::vector<std::shared_ptr<const void>> kept;

  OwnedJob() = default;
  ~OwnedJob();
  OwnedJob(const OwnedJob&) = delete;
  OwnedJob& operator=(const OwnedJob&) = delete;
};

// The bytes of a Uint8Array that another thread reads while a reference holds the array. Throws if they could move
// meanwhile. Detaching the array during the read cannot be prevented here.
std::span<const uint8_t> fixed_bytes(const Napi::Value& value, const std::string& path);

// Adds the buffers of memory sources to `held`. Checks types and ranges of fields, not their relations.
void parse_job(const Napi::Value& value, OwnedJob& out, std::vector<Napi::Reference<Napi::Value>>& held);

// One source, a NativeSource. A segment is added to the job.
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
