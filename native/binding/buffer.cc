#include "binding/buffer.h"

#include "binding/fields.h"

namespace refit::binding {

void free_buffer(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsArrayBuffer()) {
    throw Napi::TypeError::New(env, "buffer: expected an ArrayBuffer, got " + describe(info[0]));
  }
  Napi::ArrayBuffer buffer = info[0].As<Napi::ArrayBuffer>();
  if (!buffer.IsDetached()) buffer.Detach();
}

Napi::Value page_offset(const Napi::CallbackInfo& info) {
  const auto bytes = to_span<uint8_t>(info[0], "bytes");
  return Napi::Number::New(info.Env(), static_cast<double>(reinterpret_cast<uintptr_t>(bytes.data()) % 4096));
}

}  // namespace refit::binding
