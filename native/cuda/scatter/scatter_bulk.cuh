// The bulk half of the scatter: one warp of a block moves tiles by asynchronous bulk copies (cp.async.bulk, sm_90)
// through stages of shared memory; no byte passes through a register.
#pragma once
#include "cuda/device/shared_address.cuh"
#include "cuda/scatter/scatter_tile.cuh"

namespace refit::cuda {

// 4 stages of 24 KB, two blocks on a multiprocessor: 95 % of cudaMemcpyAsync for all addresses of source and target.
// Ordinary loads and stores reach 90 to 97 %, depending on the addresses.
constexpr uint32_t kBulkStages = 4;

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

__device__ __forceinline__ void bulk_load(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(uint64_t to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all except the latest `kPending` groups of this thread have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

struct BulkState {
  alignas(8) uint64_t loaded[kBulkStages];
  ScatterJob jobs[kBulkStages];
};

// Run by one whole warp. `stages`: kBulkStages times kBulkBytes of shared memory, aligned to 128.
__device__ void run_bulk(const ScatterTiles& list, BulkState& state, uint8_t* stages) {
  // Half of the stages are loaded while the others are stored.
  constexpr uint32_t kAhead = kBulkStages / 2;
  const uint32_t lane = threadIdx.x % 32;
  if (lane == 0) {
    for (uint32_t i = 0; i < kBulkStages; i++) barrier_init(shared_address(&state.loaded[i]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  TileFeed feed(list);
  feed.ask();
  uint32_t loads = 0, stores = 0;
  bool more = true;
  while (more || stores < loads) {
    if (more) {
      const uint32_t stage = loads % kBulkStages;
      // At this point `loads - kAhead` stores were issued once the pipe is full; the one that used this stage is
      // kBulkStages - kAhead back.
      if (loads >= kBulkStages) bulk_wait_read<kBulkStages - kAhead - 1>();
      __syncwarp();
      ScatterJob& job = state.jobs[stage];
      feed.next(job);
      __syncwarp();
      more = !job.end;
      if (more) {
        const uint32_t bytes = job.range.slots * 16;
        const uint32_t barrier = shared_address(&state.loaded[stage]);
        const uint32_t to = shared_address(stages) + stage * kBulkBytes;
        const uint64_t from = job.copy.src + job.range.row * static_cast<uint64_t>(job.copy.src_row) +
                              static_cast<uint64_t>(job.range.slot) * 16;
        if (lane == 0) barrier_expect(barrier, job.range.rows * bytes);
        __syncwarp();
        for (uint32_t r = lane; r < job.range.rows; r += 32) {
          bulk_load(to + r * bytes, from + r * static_cast<uint64_t>(job.copy.src_row), bytes, barrier);
        }
        loads++;
      }
    }
    if (stores < loads && (!more || loads - stores > kAhead)) {
      const uint32_t stage = stores % kBulkStages;
      barrier_wait(shared_address(&state.loaded[stage]), stores / kBulkStages % 2);
      const ScatterJob& job = state.jobs[stage];
      const uint32_t bytes = job.range.slots * 16;
      const uint32_t from = shared_address(stages) + stage * kBulkBytes;
      const uint64_t to = job.copy.dst + job.range.row * static_cast<uint64_t>(job.copy.dst_row) +
                          static_cast<uint64_t>(job.range.slot) * 16;
      for (uint32_t r = lane; r < job.range.rows; r += 32) {
        bulk_store(to + r * static_cast<uint64_t>(job.copy.dst_row), from + r * bytes, bytes);
      }
      bulk_commit();
      stores++;
    }
  }
  bulk_wait_all();
}

#endif

}  // namespace refit::cuda
