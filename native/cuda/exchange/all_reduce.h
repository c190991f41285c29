// Sum over ranks by reading the peers' memory: every rank has two buffers that all others can read (arenas mapped for
// all GPUs), and flags in the same memory. Sums are made in fp32 in rank order and rounded once, so every rank holds
// the same bits. All ranks make the same calls in the same order; nothing waits on the host.
//
// Ranks may share a GPU: then all their kernels must fit it at once, beside whatever the last rank still computes.
#pragma once
#include <cstddef>

#include "cuda/device/types.h"

namespace refit::cuda {

// Flag words of one rank; zeroed once at the start, when no rank uses them.
constexpr size_t kSignalBytes = 64 * 1024;

constexpr int kCollectiveBlocks = 48, kSharedBlocks = 8;

// Of more bytes every rank sums a share: what a rank reads then counts for more than a second meeting.
constexpr int64_t kOneShotBytes = 512 * 1024;

struct PeerGroup {
  int ranks = 1;
  int rank = 0;
  // Most blocks of a collective's kernel, the same on all ranks; kSharedBlocks where ranks share a GPU.
  int blocks = kCollectiveBlocks;
  // Of each rank, readable and writable from this one; aligned to 16.
  bf16* buffers[2][kMaxRanks] = {};
  uint64_t* signals[kMaxRanks] = {};
};

// out[i] = the sum over ranks of buffers[side][rank][i], for i < count. `count` is rounded up to a multiple of 8, which
// all memory must hold. `out` is this rank's own memory, aligned to 16, and none of the buffers. One-shot for small
// messages, two-shot for large ones.
//
// What may be overwritten when: peers read the buffer until they have ended this call, and they are known to have ended
// it only when this rank has passed the next collective. So successive calls take the sides in turn. Two-shot also
// writes to the own buffer.
//
// `epoch` is the caller's: one number per call, the same on all ranks, rising, above 0.
void all_reduce(const PeerGroup& group, int side, bf16* out, int64_t count, uint64_t epoch, cudaStream_t stream);
// All that ranks launched before it, whoever's memory it wrote, is visible to all ranks' later kernels.
void barrier(const PeerGroup& group, uint64_t epoch, cudaStream_t stream);

// all_reduce's two ways, for tests and benchmarks. One-shot: every rank reads all buffers. Two-shot: every rank sums a
// share, then all gather the shares.
void all_reduce_one_shot(const PeerGroup& group, int side, bf16* out, int64_t count, uint64_t epoch,
                         cudaStream_t stream);
void all_reduce_two_shot(const PeerGroup& group, int side, bf16* out, int64_t count, uint64_t epoch,
                         cudaStream_t stream);

// The same sum, bit for bit, of buffers that are all on this rank's GPU: out[i] = the sum over r < ranks of
// buffers[r][i], for i < count rounded up to a multiple of 8. `out` may be one of them.
struct SumParts {
  const bf16* buffers[kMaxRanks] = {};
};
void sum_parts(const SumParts& parts, int ranks, bf16* out, int64_t count, cudaStream_t stream);

}  // namespace refit::cuda
