// Reference counts that torch keeps in POSIX shared memory, beside what other processes do with them at the same time.
#pragma once
#include <cstdint>

namespace refit {

// torch's libshm (RefcountedMapAllocator): an int32 at the start of the file counts who uses it; data from byte 64 on.
// torch's CUDA IPC (CudaIPCTypes): an int64 per share from byte 64 on, 10,000 of them in a file.
enum class SharedCount { kFile, kCudaShare };

// Takes `references` from a count, never below 0, and returns what is left; -1 where there was none to take. `slot` of
// kCudaShare, 0 of kFile.
// Throws std::invalid_argument where the file ends before the count, std::system_error where it cannot be mapped.
int64_t drop_references(int fd, SharedCount kind, int64_t slot, int64_t references);

}  // namespace refit
