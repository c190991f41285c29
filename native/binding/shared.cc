#include "binding/shared.h"

#include "binding/fields.h"
#include "transport/shared_count.h"

namespace refit::binding {
namespace {

constexpr int64_t kMaxInt = 0x7fffffff;
// CUDA_IPC_REF_COUNTER_FILE_SIZE
constexpr int64_t kSlots = 10'000;

int fd_of(const Napi::CallbackInfo& info) { return static_cast<int>(to_integer(info[0], "fd", 0, kMaxInt)); }

}  // namespace

Napi::Value drop_file_references(const Napi::CallbackInfo& info) {
  const int64_t references = to_integer(info[1], "references", 1, kMaxInt);
  const int64_t left = drop_references(fd_of(info), SharedCount::kFile, 0, references);
  return Napi::Number::New(info.Env(), static_cast<double>(left));
}

Napi::Value drop_cuda_reference(const Napi::CallbackInfo& info) {
  const int64_t slot = to_integer(info[1], "slot", 0, kSlots - 1);
  const int64_t left = drop_references(fd_of(info), SharedCount::kCudaShare, slot, 1);
  return Napi::Number::New(info.Env(), static_cast<double>(left));
}

}  // namespace refit::binding
