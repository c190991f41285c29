#include "binding/weights/write_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "binding/fields.h"
#include "binding/groups/groups.h"
#include "binding/row_layout.h"

namespace refit::binding {
namespace {

size_t record_count(Napi::Env env, size_t length, size_t fields, const std::string& name) {
  if (length % fields == 0) return length / fields;
  throw Napi::RangeError::New(
      env, name + ": expected a multiple of " + std::to_string(fields) + " entries, got " + std::to_string(length));
}

int duplicate(Napi::Env env, int number, const std::string& path) {
  const int fd = fcntl(number, F_DUPFD_CLOEXEC, 3);
  if (fd >= 0) return fd;
  throw Napi::Error::New(env, path + ": cannot use file descriptor " + std::to_string(number) + ": " + strerror(errno));
}

std::vector<uint8_t> to_bytes(const Napi::Value& value, const std::string& path) {
  const auto bytes = to_span<uint8_t>(value, path);
  return {bytes.begin(), bytes.end()};
}

// Fills the job piece by piece, so that its descriptors are closed with it after an error.
void parse_segment(const Napi::Value& value, const std::string& path, Segment& out) {
  const Napi::Env env = value.Env();
  const Napi::Object object = to_object(value, path);
  out.uuid = to_string(object.Get("uuid"), path + ".uuid");
  out.events = to_bytes(object.Get("events"), path + ".events");
  const Napi::Value keep = object.Get("keep");
  if (!keep.IsUndefined()) out.keep = to_string(keep, path + ".keep");
  const Napi::Value handle = object.Get("handle");
  if (handle.IsTypedArray()) {
    out.handle = to_bytes(handle, path + ".handle");
    return;
  }
  const Napi::Object blocks = to_object(handle, path + ".handle");
  out.block_bytes =
      static_cast<uint64_t>(to_integer(blocks.Get("blockBytes"), path + ".handle.blockBytes", 1, kMaxSafe));
  out.fabric = to_bytes(blocks.Get("fabric"), path + ".handle.fabric");
  const Napi::Array fds = to_array(blocks.Get("fds"), path + ".handle.fds");
  out.fds.reserve(fds.Length());
  for (uint32_t i = 0; i < fds.Length(); i++) {
    const std::string name = path + ".handle.fds[" + std::to_string(i) + "]";
    out.fds.push_back(duplicate(env, static_cast<int>(to_integer(fds[i], name, 0, kMaxInt)), name));
  }
}

Source parse_staged(const Napi::Value& value, const std::string& path, OwnedJob& out) {
  const Napi::Object object = to_object(value, path);
  const int handle = static_cast<int>(to_integer(object.Get("group"), path + ".group", 0, kMaxInt));
  const int slot = static_cast<int>(to_integer(object.Get("slot"), path + ".slot", 0, kGroupSlots - 1));
  try {
    StagedSlot staged = find_group(handle)->group().staged(slot);
    out.kept.push_back(std::move(staged.memory));
    return staged.source;
  } catch (const std::invalid_argument& e) {
    throw Napi::Error::New(value.Env(), path + ": " + e.what());
  }
}

}  // namespace

std::span<const uint8_t> fixed_bytes(const Napi::Value& value, const std::string& path) {
  const auto bytes = to_span<uint8_t>(value, path);
  const Napi::ArrayBuffer memory = value.As<Napi::TypedArray>().ArrayBuffer();
  if (memory.Get("resizable").ToBoolean() || memory.Get("growable").ToBoolean()) {
    throw Napi::TypeError::New(value.Env(), path + ": expected memory of fixed size, got a resizable buffer");
  }
  if (memory.IsArrayBuffer() && memory.IsDetached()) {
    throw Napi::TypeError::New(value.Env(), path + ": its ArrayBuffer is detached");
  }
  return bytes;
}

Source parse_source(const Napi::Value& value, const std::string& path, OwnedJob& out,
                    std::vector<Napi::Reference<Napi::Value>>& held) {
  const Napi::Env env = value.Env();
  const Napi::Object object = to_object(value, path);
  const Napi::Value fd = object.Get("fd");
  const Napi::Value buffer = object.Get("buffer");
  const Napi::Value segment = object.Get("segment");
  const Napi::Value staged = object.Get("staged");
  if (fd.IsUndefined() + buffer.IsUndefined() + segment.IsUndefined() + staged.IsUndefined() != 3) {
    throw Napi::TypeError::New(env, path + ": expected one of fd, buffer, segment and staged");
  }
  if (!staged.IsUndefined()) return parse_staged(staged, path + ".staged", out);
  Source source;
  if (!segment.IsUndefined()) {
    source.segment = static_cast<int>(out.job.segments.size());
    out.job.segments.emplace_back();
    parse_segment(segment, path + ".segment", out.job.segments.back());
    return source;
  }
  if (!fd.IsUndefined()) {
    source.fd = duplicate(env, static_cast<int>(to_integer(fd, path + ".fd", 0, kMaxInt)), path + ".fd");
    return source;
  }
  const auto bytes = fixed_bytes(buffer, path + ".buffer");
  source.data = bytes.data();
  source.bytes = bytes.size();
  held.push_back(Napi::Reference<Napi::Value>::New(buffer, 1));
  return source;
}

OwnedJob::~OwnedJob() {
  for (const Source& source : job.sources) {
    if (source.fd >= 0) close(source.fd);
  }
  for (const Segment& segment : job.segments) {
    for (const int fd : segment.fds) close(fd);
  }
}

int64_t exact_integer(Napi::Env env, double value, int64_t max, const std::string& name, size_t index,
                      const char* field) {
  if (value >= 0 && value <= static_cast<double>(max)) {
    const auto whole = static_cast<int64_t>(value);
    if (static_cast<double>(whole) == value) return whole;
  }
  throw Napi::RangeError::New(env, name + "[" + std::to_string(index) + "]" + (*field != 0 ? "." : "") + field +
                                       ": expected an integer from 0 to " + std::to_string(max) + ", got " +
                                       describe(Napi::Number::New(env, value)));
}

std::vector<Tensor> parse_tensors(const Napi::Value& value, const std::string& name) {
  const Napi::Env env = value.Env();
  const auto numbers = to_span<double>(value, name);
  std::vector<Tensor> tensors(record_count(env, numbers.size(), TensorRow::kNames.size(), name));
  for (size_t i = 0; i < tensors.size(); i++) {
    const double* at = numbers.data() + i * TensorRow::kNames.size();
    const auto field = [&](TensorRow::Field k, int64_t max = kMaxSafe) {
      return exact_integer(env, at[k], max, name, i, TensorRow::kNames[k]);
    };
    Tensor& tensor = tensors[i];
    tensor.source = static_cast<int>(field(TensorRow::kSource, kMaxInt));
    tensor.offset = static_cast<uint64_t>(field(TensorRow::kOffset));
    tensor.dtype = static_cast<DType>(field(TensorRow::kDtype, static_cast<int64_t>(kDTypes) - 1));
    tensor.rows = field(TensorRow::kRows);
    tensor.cols = field(TensorRow::kCols);
    tensor.row_bytes = static_cast<uint64_t>(field(TensorRow::kRowBytes));
    tensor.col_bytes = static_cast<uint64_t>(field(TensorRow::kColBytes));
  }
  return tensors;
}

std::vector<Rect> parse_rects(const Napi::Value& value, const std::string& name) {
  const Napi::Env env = value.Env();
  const auto numbers = to_span<double>(value, name);
  std::vector<Rect> rects(record_count(env, numbers.size(), RectRow::kNames.size(), name));
  for (size_t i = 0; i < rects.size(); i++) {
    const double* at = numbers.data() + i * RectRow::kNames.size();
    const auto small = [&](RectRow::Field k) {
      return static_cast<int>(exact_integer(env, at[k], kMaxInt, name, i, RectRow::kNames[k]));
    };
    const auto large = [&](RectRow::Field k) {
      return exact_integer(env, at[k], kMaxSafe, name, i, RectRow::kNames[k]);
    };
    rects[i] = {small(RectRow::kTensor), small(RectRow::kRank),   small(RectRow::kParam),
                large(RectRow::kSrcRow), large(RectRow::kSrcCol), large(RectRow::kRows),
                large(RectRow::kCols),   large(RectRow::kDstRow), large(RectRow::kDstCol)};
  }
  return rects;
}

void parse_job(const Napi::Value& value, OwnedJob& out, std::vector<Napi::Reference<Napi::Value>>& held) {
  const Napi::Env env = value.Env();
  const Napi::Object object = to_object(value, "job");
  const Napi::Array sources = to_array(object.Get("sources"), "job.sources");
  out.job.sources.reserve(sources.Length());
  for (uint32_t i = 0; i < sources.Length(); i++) {
    const Napi::HandleScope scope(env);
    out.job.sources.push_back(parse_source(sources[i], "job.sources[" + std::to_string(i) + "]", out, held));
  }
  out.job.tensors = parse_tensors(object.Get("tensors"), "job.tensors");
  out.job.rects = parse_rects(object.Get("rects"), "job.rects");
  const Napi::Value timeout = object.Get("eventTimeoutMs");
  if (!timeout.IsUndefined()) {
    out.job.event_timeout_ms = static_cast<int>(to_integer(timeout, "job.eventTimeoutMs", 0, kMaxInt));
  }
}

}  // namespace refit::binding
