#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cuda/device/check.h"
#include "cuda/device/inject.h"

namespace refit::cuda {
namespace {

__global__ void write_nowhere(volatile int* address) { *address = 1; }

// The word lies in host memory and is volatile, so the compiler must assume that it changes. Nothing changes it.
__global__ void never_end(const volatile int* word) {
  while (*word == 0) __nanosleep(1000);
}

int64_t number(const std::string& text, const std::string& whole, int64_t least) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != 0 || value < least) {
    throw std::invalid_argument("REFIT_CUDA_FAULT: expected illegal:STEP[:RANK] or hang:STEP[:RANK], got \"" + whole +
                                '"');
  }
  return value;
}

}  // namespace

Fault fault_from_environment() {
  const char* const set = std::getenv("REFIT_CUDA_FAULT");
  if (set == nullptr || *set == 0) return {};
  const std::string text = set;
  const size_t first = text.find(':');
  const std::string kind = text.substr(0, first);
  Fault fault;
  fault.kind = kind == "illegal" ? Fault::Kind::kIllegal : kind == "hang" ? Fault::Kind::kHang : Fault::Kind::kNone;
  if (fault.kind == Fault::Kind::kNone || first == std::string::npos) number("", text, 0);
  const size_t second = text.find(':', first + 1);
  fault.step = number(text.substr(first + 1, second == std::string::npos ? second : second - first - 1), text, 1);
  if (second != std::string::npos) fault.rank = static_cast<int>(number(text.substr(second + 1), text, 0));
  return fault;
}

void launch_fault(Fault::Kind kind, cudaStream_t stream) {
  if (kind == Fault::Kind::kIllegal) {
    // No memory is ever mapped on the first page.
    write_nowhere<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(uintptr_t{0x10}));
    check_launch("the injected illegal write");
  } else if (kind == Fault::Kind::kHang) {
    static int* word = [] {
      int* p = nullptr;
      check(cudaHostAlloc(&p, sizeof(int), cudaHostAllocPortable), "cudaHostAlloc");
      *p = 0;
      return p;
    }();
    never_end<<<1, 1, 0, stream>>>(word);
    check_launch("the injected kernel that never ends");
  }
}

}  // namespace refit::cuda
