// Sums and gathers over ranks by reading the peers' memory: every rank has two buffers that all others can read (arenas
// mapped for all GPUs), and flags in the same memory. Sums are made in fp32 in rank order and rounded once, so every
// rank holds the same bits. All ranks make the same calls in the same order; the host never waits.
//
// Ranks may share a GPU. Then all their kernels must fit it at once, together with the kernels that the last rank still
// runs.
#pragma once
#include <cstddef>

#include "cuda/device/types.h"

namespace refit::cuda {

// Bytes of one rank's flags; zeroed once at the start, when no rank uses them.
constexpr size_t kSignalBytes = 64 * 1024;

constexpr int kCollectiveBlocks = 48, kSharedBlocks = 8;

// For more bytes, every rank sums one part (two-shot): the bytes that a rank reads then cost more than a second
// barrier.
constexpr int64_t kOneShotBytes = 512 * 1024;

// The number of a call, ascending and above 0: `call`, counted from a number on the GPU if there is one. So a graph can
// make the same calls again.
struct Epoch {
  Epoch(uint64_t call, const uint64_t* base = nullptr) : call(call), base(base) {}
  uint64_t call;
  const uint64_t* base;
};

struct PeerGroup {
  int ranks = 1;
  int rank = 0;
  int blocks = kCollectiveBlocks;
  // Buffers of each rank, readable and writable from this one; aligned to 16.
  Element* buffers[2][kMaxRanks] = {};
  uint64_t* signals[kMaxRanks] = {};
};

// out[i] = the sum over ranks of buffers[side][rank][i], for i < count. `count` is rounded up to a multiple of 8, and
// all memory must hold that many. `out` is this rank's own memory, aligned to 16, and none of the buffers. One-shot for
// small messages, two-shot for large ones.
//
// When a buffer may be overwritten: peers read it until they have ended this call, and this rank knows that only after
// the next collective. So successive calls alternate between the sides. Two-shot also writes to the own buffer.
//
// `epoch`: the same on all ranks.
void all_reduce(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch, cudaStream_t stream);
// out [rows, ranks * columns]: each row holds the ranks' rows of buffers[side][rank] [rows, columns], in rank order.
// `columns` is a multiple of 8; `out` and `epoch` as above.
void all_gather(const PeerGroup& group, int side, Element* out, int64_t rows, int64_t columns, Epoch epoch,
                cudaStream_t stream);
// Later kernels of all ranks see everything that earlier kernels of all ranks wrote, in any rank's memory.
void barrier(const PeerGroup& group, Epoch epoch, cudaStream_t stream);

// The two ways of all_reduce, for tests and benchmarks. One-shot: every rank reads all buffers. Two-shot: every rank
// sums one part, then all ranks gather the parts.
void all_reduce_one_shot(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch,
                         cudaStream_t stream);
void all_reduce_two_shot(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch,
                         cudaStream_t stream);

// The same sum, bit for bit, for buffers that are all on this rank's GPU: out[i] = the sum over r < ranks of
// buffers[r][i], for i < count rounded up to a multiple of 8. `out` may be one of them.
struct SumParts {
  const Element* buffers[kMaxRanks] = {};
};
void sum_parts(const SumParts& parts, int ranks, Element* out, int64_t count, cudaStream_t stream);

}  // namespace refit::cuda
