// Ranks with parameters, and the memory that a sender in another process shares with them (ipc_sender.cuh). For
// ipc_test.cc, which compiles the executor and the sessions with their fault points before it includes this.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/write/write_check.h"
#include "cuda/device/uuid.h"
#include "cuda/exchange/peers.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/write.h"
#include "test/gpu/ipc/ipc_kernels.h"
#include "test/gpu/ipc/ipc_sender.cuh"

using namespace refit;
using namespace refit::cuda;
using refit::ipc_test::Command;
using refit::ipc_test::count_wrong;
using refit::ipc_test::Sender;
using refit::ipc_test::Wrong;

namespace {

constexpr int64_t kCols = 512;
constexpr uint64_t kRowBytes = kCols * 2;

int gpu_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

std::string uuid_of(int gpu) {
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, gpu), "cudaGetDeviceProperties");
  return uuid_text(prop.uuid);
}

// `tensors` parameters of `rows` rows in each of `segments` segments; every rank holds its shard of the rows.
struct World {
  World(int ranks_wanted, int segments, int tensors, int64_t rows)
      : segments(segments), tensors(tensors), rows(rows), count(ranks_wanted) {
    const int gpus = gpu_count();
    for (int r = 0; r < count; r++) ranks.push_back(std::make_unique<Rank>(r, r % gpus));
    std::vector<int> used;
    for (const auto& rank : ranks) used.push_back(rank->device);
    on_all(ranks, [&](Rank& rank) { enable_peers(rank, used); });
    params.ranks = &ranks;
    for (int p = 0; p < segments * tensors; p++)
      params.shapes.push_back({"p" + std::to_string(p), rows / count, kCols});
    blocks.resize(static_cast<size_t>(count));
    const uint64_t each = static_cast<uint64_t>(rows / count) * kRowBytes;
    for (int r = 0; r < count; r++) {
      ranks[r]
          ->run([&] { check(cudaMalloc(&blocks[r], each * params.shapes.size()), "cudaMalloc(parameters)"); })
          .get();
      for (size_t p = 0; p < params.shapes.size(); p++) {
        params.addresses.push_back(reinterpret_cast<Element*>(static_cast<uint8_t*>(blocks[r]) + p * each));
      }
    }
    store = std::make_unique<GpuStore>(std::vector{params}, 8);
  }
  ~World() {
    store.reset();
    for (int r = 0; r < count; r++) ranks[r]->run([&] { cudaFree(blocks[r]); }).get();
  }

  uint64_t segment_bytes() const { return static_cast<uint64_t>(rows) * kRowBytes * static_cast<uint64_t>(tensors); }

  // A job that reads everything from the segments; `make` describes each segment.
  template <typename Make>
  WriteJob job(Make make) const {
    WriteJob job;
    for (int s = 0; s < segments; s++) {
      Source source;
      source.segment = s;
      job.sources.push_back(source);
      job.segments.push_back(make(s));
      for (int t = 0; t < tensors; t++) {
        Tensor tensor;
        tensor.source = s;
        tensor.offset = static_cast<uint64_t>(t) * static_cast<uint64_t>(rows) * kRowBytes;
        tensor.rows = rows;
        tensor.cols = kCols;
        tensor.row_bytes = kRowBytes;
        tensor.col_bytes = 2;
        const int index = static_cast<int>(job.tensors.size());
        job.tensors.push_back(tensor);
        for (int r = 0; r < count; r++) {
          Rect rect;
          rect.tensor = index;
          rect.rank = r;
          rect.param = index;
          rect.src_row = r * (rows / count);
          rect.rows = rows / count;
          rect.cols = kCols;
          job.rects.push_back(rect);
        }
      }
    }
    check_write(job, count, params.shapes);
    return job;
  }

  // Number of elements that differ from what the sender wrote with the seed.
  uint64_t wrong_elements(uint64_t seed) {
    uint64_t sum = 0;
    for (int r = 0; r < count; r++) {
      for (size_t p = 0; p < params.shapes.size(); p++) {
        Wrong host{0, ~0ull};
        ranks[r]
            ->run([&] {
              Wrong* counter = nullptr;
              check(cudaMalloc(&counter, sizeof host), "cudaMalloc");
              check(cudaMemcpy(counter, &host, sizeof host, cudaMemcpyHostToDevice), "cudaMemcpy");
              const uint64_t elements = static_cast<uint64_t>(rows / count) * kCols;
              const uint64_t from = (p % tensors * static_cast<uint64_t>(rows) + r * (rows / count)) * kCols;
              count_wrong(reinterpret_cast<const uint16_t*>(params.at(r, static_cast<int>(p))), elements, from, seed,
                          p / tensors, counter, ranks[r]->stream);
              check(cudaStreamSynchronize(ranks[r]->stream), "count_wrong");
              check(cudaMemcpy(&host, counter, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
              cudaFree(counter);
            })
            .get();
        if (host.count > 0 && sum == 0) {
          std::fprintf(stderr, "rank %d parameter %zu: %llu wrong elements, the first at %llu\n", r, p, host.count,
                       host.first);
        }
        sum += host.count;
      }
    }
    return sum;
  }

  const int segments, tensors;
  const int64_t rows;
  const int count;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<void*> blocks;
  GpuParams params;
  std::unique_ptr<GpuStore> store;
};

struct Shared {
  std::vector<uint8_t> handles, events;
  std::string uuid;

  Segment segment(int s, std::string keep = "") const {
    Segment out;
    out.uuid = uuid;
    out.handle.assign(handles.begin() + s * 64, handles.begin() + (s + 1) * 64);
    if (s == 0) out.events = events;
    out.keep = std::move(keep);
    return out;
  }
};

Shared share(Sender& sender, const World& world, int gpu) {
  return {sender.request({'A', gpu, world.segments, 0, world.segment_bytes(), 0}), {}, uuid_of(gpu)};
}

void refill(Sender& sender, Shared& shared, int gpu, uint64_t seed, int events, int spin_ms) {
  shared.events = sender.request({'F', gpu, events, spin_ms, 0, seed});
}

}  // namespace
