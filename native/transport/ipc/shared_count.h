// Reference counts that torch keeps in POSIX shared memory. Other processes may change them at the same time.
#pragma once
#include <cstdint>
#include <span>

namespace refit {

// torch's libshm (RefcountedMapAllocator): an int32 at the start of the file counts its users; the data begins at byte
// 64. Subtracts `references`, never below 0, and returns the rest; -1 if the count was 0 already. Throws
// std::invalid_argument if the file ends before the count, std::system_error if it cannot be mapped.
int64_t drop_file_references(int fd, int32_t references);

// torch's CUDA IPC (CudaIPCTypes): an int64 for each handle from byte 64 on, 10,000 of them in a file. Subtracts one
// from each of `slots`, never below 0, and returns how many it was subtracted from. Slots past the file's end are
// skipped. Throws std::invalid_argument if the file ends before the first slot, std::system_error if it cannot be
// mapped.
int64_t drop_cuda_references(int fd, std::span<const int32_t> slots);

}  // namespace refit
