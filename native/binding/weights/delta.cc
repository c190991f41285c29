#include "binding/weights/delta.h"

#include <sys/file.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/fields.h"
#include "binding/row_layout.h"
#include "binding/weights/write_job.h"
#include "codec/tensor_delta.h"

namespace refit::binding {
namespace {

constexpr int64_t kMaxInt = 0x7fffffff;
constexpr size_t kFields = DeltaRow::kNames.size();

}  // namespace

Napi::Value lock_file(const Napi::CallbackInfo& info) {
  const auto fd = static_cast<int>(to_integer(info[0], "fd", 0, kMaxInt));
  const bool ours = flock(fd, LOCK_EX | LOCK_NB) == 0;
  if (!ours && errno != EWOULDBLOCK && errno != EINTR) {
    throw std::runtime_error(std::string("flock: ") + strerror(errno));
  }
  return Napi::Boolean::New(info.Env(), ours);
}

Napi::Value apply_deltas(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto data = to_span<uint8_t>(info[0], "data");
  const auto table = to_span<double>(info[1], "table");
  const bool is_xor = info[2].ToBoolean();
  const bool is_xxh3 = info[3].ToBoolean();
  const auto threads = static_cast<int>(to_integer(info[4], "threads", 1, 256));
  if (table.size() % kFields != 0) throw Napi::TypeError::New(env, "table is not of whole rows");
  std::vector<TensorDelta> deltas;
  for (size_t row = 0; row < table.size() / kFields; row++) {
    const double* const at = table.data() + row * kFields;
    const auto field = [&](DeltaRow::Field k, int64_t max = kMaxSafe) {
      return static_cast<uint64_t>(exact_integer(env, at[k], max, "table", row, DeltaRow::kNames[k]));
    };
    const auto fd = static_cast<int>(field(DeltaRow::kFd, kMaxInt));
    const uint64_t offset = field(DeltaRow::kOffset), bytes = field(DeltaRow::kBytes), begin = field(DeltaRow::kBegin),
                   end = field(DeltaRow::kEnd);
    if (begin > end || end > data.size()) throw Napi::RangeError::New(env, "a row lies outside of data");
    deltas.push_back({fd, offset, bytes, data.data() + begin, end - begin});
  }
  const std::vector<std::string> sums =
      refit::apply_deltas(deltas, is_xor ? DeltaEncoding::kXor : DeltaEncoding::kOverwrite,
                          is_xxh3 ? DeltaChecksum::kXxh3 : DeltaChecksum::kAdler32, threads);
  Napi::Array out = Napi::Array::New(env, sums.size());
  for (size_t i = 0; i < sums.size(); i++) out.Set(static_cast<uint32_t>(i), Napi::String::New(env, sums[i]));
  return out;
}

}  // namespace refit::binding
