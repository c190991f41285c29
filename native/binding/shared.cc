#include "binding/shared.h"

#include "binding/fields.h"
#include "transport/ipc/ipc_descriptor.h"
#include "transport/ipc/local_socket.h"
#include "transport/ipc/shared_count.h"

namespace refit::binding {
namespace {

int fd_of(const Napi::CallbackInfo& info) { return static_cast<int>(to_integer(info[0], "fd", 0, kMaxInt)); }

}  // namespace

Napi::Value take_descriptor(const Napi::CallbackInfo& info) {
  const int64_t pid = to_integer(info[0], "pid", 1, kMaxInt);
  const int64_t fd = to_integer(info[1], "fd", 0, kMaxInt);
  return Napi::Number::New(info.Env(), ipc::take_descriptor(static_cast<int32_t>(pid), static_cast<int32_t>(fd)));
}

Napi::Value connect_local(const Napi::CallbackInfo& info) {
  if (!info[0].IsString()) throw Napi::TypeError::New(info.Env(), "path is not a string");
  return Napi::Number::New(info.Env(), refit::connect_local(info[0].As<Napi::String>().Utf8Value()));
}

Napi::Value drop_file_references(const Napi::CallbackInfo& info) {
  const int64_t references = to_integer(info[1], "references", 1, kMaxInt);
  return Napi::Number::New(
      info.Env(), static_cast<double>(refit::drop_file_references(fd_of(info), static_cast<int32_t>(references))));
}

Napi::Value drop_cuda_references(const Napi::CallbackInfo& info) {
  const int64_t taken = refit::drop_cuda_references(fd_of(info), to_span<int32_t>(info[1], "slots"));
  return Napi::Number::New(info.Env(), static_cast<double>(taken));
}

}  // namespace refit::binding
