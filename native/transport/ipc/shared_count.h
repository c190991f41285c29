// Reference counts that torch keeps in POSIX shared memory, beside what other processes do with them at the same time.
#pragma once
#include <cstdint>
#include <span>

namespace refit {

// torch's libshm (RefcountedMapAllocator): an int32 at the start of the file counts who uses it; data from byte 64 on.
// Takes `references` from it, never below 0, and returns what is left; -1 where there was none to take. Throws
// std::invalid_argument where the file ends before the count, std::system_error where it cannot be mapped.
int64_t drop_file_references(int fd, int32_t references);

// torch's CUDA IPC (CudaIPCTypes): an int64 per share from byte 64 on, 10,000 of them in a file. Takes one from each of
// `slots`, never below 0; returns from how many it was taken. Slots that lie beyond the file's end are left out. Throws
// std::invalid_argument where the file ends before the first slot, std::system_error where it cannot be mapped.
int64_t drop_cuda_references(int fd, std::span<const int32_t> slots);

}  // namespace refit
