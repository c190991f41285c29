#include "binding/weights/delta.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/fields.h"
#include "binding/row_layout.h"
#include "binding/weights/write_job.h"
#include "codec/tensor_delta.h"

namespace refit::binding {
namespace {

constexpr size_t kFields = DeltaRow::kNames.size();

/** File systems of this machine, on which a lease for reading is refused only because of a writer or the file's owner.
 */
bool knows_writers(uint32_t type) {
  constexpr uint32_t kKnown[] = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0x858458F6};
  return std::find(std::begin(kKnown), std::end(kKnown), type) != std::end(kKnown);
}

}  // namespace

Napi::Value lock_file(const Napi::CallbackInfo& info) {
  const auto fd = static_cast<int>(to_integer(info[0], "fd", 0, kMaxInt));
  const bool ours = flock(fd, LOCK_EX | LOCK_NB) == 0;
  if (!ours && errno != EWOULDBLOCK && errno != EINTR) {
    throw std::runtime_error(std::string("flock: ") + strerror(errno));
  }
  return Napi::Boolean::New(info.Env(), ours);
}

Napi::Value has_writer(const Napi::CallbackInfo& info) {
  const auto fd = static_cast<int>(to_integer(info[0], "fd", 0, kMaxInt));
  // Network file systems refuse leases for other reasons.
  struct statfs system;
  if (fstatfs(fd, &system) != 0 || !knows_writers(static_cast<uint32_t>(system.f_type))) {
    return Napi::Boolean::New(info.Env(), false);
  }
  // A writer that opens the file before the lease is given back sends a signal, which is SIGIO by default and would end
  // the process. SIGURG is ignored.
  fcntl(fd, F_SETSIG, SIGURG);
  const bool leased = fcntl(fd, F_SETLEASE, F_RDLCK) == 0;
  const bool written = !leased && errno == EAGAIN;
  if (leased) fcntl(fd, F_SETLEASE, F_UNLCK);
  return Napi::Boolean::New(info.Env(), written);
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
