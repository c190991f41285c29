// Jobs over sources of any place, and weights on GPUs that they are written to. For write_test.cc.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/store.h"
#include "core/write/write_check.h"
#include "cuda/device/check.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/write.h"
#include "test/check.h"
#include "test/random.h"

using namespace refit;
using namespace refit::cuda;
using test::Random;

namespace {

enum class Place { kFile, kMemory, kPinned, kGpu };

// A job over sources of any place; the reference uses the same bytes in host memory.
struct Fixture {
  CoreConfig config;
  WriteJob job;
  std::vector<std::vector<uint8_t>> bytes;  // of each source
  std::vector<Place> places;
  std::vector<int> fds;
  std::vector<void*> gpus, pinned;

  ~Fixture() {
    for (const int fd : fds) close(fd);
    for (void* p : gpus) cudaFree(p);
    for (void* p : pinned) cudaFreeHost(p);
  }

  void place() {
    for (size_t s = 0; s < bytes.size(); s++) {
      Source source;
      source.bytes = bytes[s].size();
      if (places[s] == Place::kFile) {
        source.fd = memfd_create("refit-test", MFD_CLOEXEC);
        fds.push_back(source.fd);
        for (size_t at = 0; at < bytes[s].size();) {
          const ssize_t wrote = ::write(source.fd, bytes[s].data() + at, bytes[s].size() - at);
          if (!CHECK(wrote > 0)) break;
          at += static_cast<size_t>(wrote);
        }
      } else if (places[s] == Place::kMemory) {
        source.data = bytes[s].data();
      } else if (places[s] == Place::kPinned) {
        void* p = nullptr;
        check(cudaHostAlloc(&p, bytes[s].size(), cudaHostAllocPortable), "cudaHostAlloc");
        pinned.push_back(p);
        std::memcpy(p, bytes[s].data(), bytes[s].size());
        source.data = static_cast<uint8_t*>(p);
      } else {
        void* p = nullptr;
        check(cudaMalloc(&p, bytes[s].size()), "cudaMalloc");
        gpus.push_back(p);
        check(cudaMemcpy(p, bytes[s].data(), bytes[s].size(), cudaMemcpyHostToDevice), "cudaMemcpy");
        source.data = static_cast<uint8_t*>(p);
        source.gpu = 0;
      }
      job.sources.push_back(source);
    }
    check_write(job, config.ranks, config.params);
  }

  WriteJob host_job() const {
    WriteJob out = job;
    for (size_t s = 0; s < bytes.size(); s++) out.sources[s] = {-1, bytes[s].data(), bytes[s].size()};
    return out;
  }
};

// Grids over all parameters from random places of random tensors, some of them strided.
void fill(Fixture& f, Random& random, int ranks, const std::vector<Place>& places, int64_t rows, int64_t cols) {
  const DType dtypes[] = {cuda::kElementType, DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  f.config.ranks = ranks;
  f.places = places;
  f.bytes.resize(places.size());
  const int params = static_cast<int>(1 + random.below(4));
  for (int p = 0; p < params; p++) {
    f.config.params.push_back(
        {"p" + std::to_string(p), 1 + random.below(rows), random.chance(4) ? 1 : 1 + random.below(cols), kElementType});
    if (random.chance(2)) f.config.params.back().cols = (f.config.params.back().cols + 7) / 8 * 8;
  }
  const int tensors = static_cast<int>(2 + random.below(5));
  std::vector<std::vector<Rect>> of_tensor(static_cast<size_t>(tensors));
  for (int t = 0; t < tensors; t++) {
    Tensor tensor;
    tensor.source = static_cast<int>(random.below(static_cast<int64_t>(places.size())));
    tensor.dtype = dtypes[random.below(4)];
    tensor.rows = 1 + random.below(rows);
    tensor.cols = random.chance(5) ? 1 : 1 + random.below(cols);
    if (random.chance(2)) tensor.cols = (tensor.cols + 7) / 8 * 8;
    const uint64_t element = size_of(tensor.dtype);
    tensor.col_bytes = element * static_cast<uint64_t>(random.chance(5) ? 2 : 1);
    tensor.row_bytes = static_cast<uint64_t>(tensor.cols) * tensor.col_bytes +
                       (random.chance(4) ? element * static_cast<uint64_t>(random.below(9)) : 0);
    if (random.chance(6)) {
      tensor.row_bytes = element;
      tensor.col_bytes = static_cast<uint64_t>(tensor.rows) * element;
    }
    std::vector<uint8_t>& source = f.bytes[static_cast<size_t>(tensor.source)];
    tensor.offset = source.size() + static_cast<uint64_t>(random.chance(2) ? 0 : random.below(20));
    source.resize(tensor.at(tensor.rows - 1, tensor.cols - 1) + element);
    f.job.tensors.push_back(tensor);
  }
  for (auto& source : f.bytes) {
    source.resize(source.size() + 1);
    for (size_t i = 0; i < source.size(); i += 8) {
      const uint64_t z = random.next();
      std::memcpy(&source[i], &z, std::min<size_t>(8, source.size() - i));
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    for (int p = 0; p < params; p++) {
      const Param& param = f.config.params[static_cast<size_t>(p)];
      const int64_t grid_rows = 1 + random.below(3), grid_cols = 1 + random.below(2);
      for (int64_t i = 0; i < grid_rows; i++) {
        for (int64_t j = 0; j < grid_cols; j++) {
          if (random.chance(6)) continue;
          const int t = static_cast<int>(random.below(tensors));
          const Tensor& tensor = f.job.tensors[static_cast<size_t>(t)];
          Rect rect{t, rank, p, 0, 0, 0, 0, param.rows * i / grid_rows, param.cols * j / grid_cols};
          rect.rows = std::min(tensor.rows, param.rows * (i + 1) / grid_rows - rect.dst_row);
          rect.cols = std::min(tensor.cols, param.cols * (j + 1) / grid_cols - rect.dst_col);
          rect.src_row = random.below(tensor.rows - rect.rows + 1);
          rect.src_col = random.below(tensor.cols - rect.cols + 1);
          of_tensor[static_cast<size_t>(t)].push_back(rect);
        }
      }
    }
  }
  for (const auto& rects : of_tensor) f.job.rects.insert(f.job.rects.end(), rects.begin(), rects.end());
}

// --- on the host: the contents of the slots and the copies out of them equal the job

constexpr size_t kGuard = 256;
constexpr uint16_t kPoison = 0xA5C3;

// Elements of 2 bytes in a parameter.
size_t halves_of(const Param& shape) {
  return static_cast<size_t>(shape.rows * shape.cols) * size_of(shape.dtype) / sizeof(uint16_t);
}

// Ranks on GPU 0 (or alternating on two GPUs that reach each other), parameters between guards, a CPU store.
struct World {
  const CoreConfig config;
  Store expected;
  Pool pool{2};
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<uint16_t*> blocks;
  GpuParams params;
  std::unique_ptr<GpuStore> store;

  World(const CoreConfig& given, int gpus) : config(given), expected(given) {
    for (int r = 0; r < config.ranks; r++) ranks.push_back(std::make_unique<Rank>(r, r % gpus));
    params.ranks = &ranks;
    params.shapes = config.params;
    for (int r = 0; r < config.ranks; r++) {
      ranks[static_cast<size_t>(r)]
          ->run([&] {
            for (const Param& shape : config.params) {
              uint16_t* block = nullptr;
              const size_t count = halves_of(shape) + 2 * kGuard;
              check(cudaMalloc(reinterpret_cast<void**>(&block), count * 2), "cudaMalloc");
              const std::vector<uint16_t> poison(count, kPoison);
              check(cudaMemcpy(block, poison.data(), count * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
              blocks.push_back(block);
              params.addresses.push_back(reinterpret_cast<Element*>(block + kGuard));
            }
          })
          .get();
    }
    store = std::make_unique<GpuStore>(std::vector{params}, 3);
  }
  ~World() {
    store.reset();
    for (uint16_t* block : blocks) cudaFree(block);
  }

  void scramble(uint64_t seed) {
    expected.scramble(seed, pool);
    store->scramble(seed);
  }

  std::vector<uint16_t> on_gpu(size_t i, bool with_guards = false) const {
    const Param& shape = config.params[i % config.params.size()];
    std::vector<uint16_t> got(halves_of(shape) + 2 * kGuard);
    check(cudaMemcpy(got.data(), blocks[i], got.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (with_guards) return got;
    return {got.begin() + kGuard, got.end() - kGuard};
  }

  // All parameters equal the reference's, and the memory around them is unchanged.
  void compare(const std::string& what) {
    for (size_t i = 0; i < blocks.size(); i++) {
      const int rank = static_cast<int>(i / config.params.size()), p = static_cast<int>(i % config.params.size());
      const auto got = on_gpu(i, true);
      const auto* want = static_cast<const uint16_t*>(expected.param(rank, p));
      const Param& shape = config.params[static_cast<size_t>(p)];
      size_t wrong = 0, first = 0;
      for (size_t k = got.size(); k-- > 0;) {
        const bool guard = k < kGuard || k >= got.size() - kGuard;
        if (got[k] != (guard ? kPoison : want[k - kGuard])) wrong++, first = k;
      }
      CHECKF(wrong == 0,
             "%s: rank %d, parameter %s [%ld, %ld]: %zu elements differ, the first is %ld (negative or past the end: a "
             "guard), got %04x",
             what.c_str(), rank, shape.name.c_str(), long(shape.rows), long(shape.cols), wrong,
             long(first) - long(kGuard), got[first]);
    }
  }
};

int usable_gpus() {
  int gpus = 0, there = 0, back = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (gpus < 2) return 1;
  check(cudaDeviceCanAccessPeer(&there, 0, 1), "cudaDeviceCanAccessPeer");
  check(cudaDeviceCanAccessPeer(&back, 1, 0), "cudaDeviceCanAccessPeer");
  if (there == 0 || back == 0) return 1;
  check(cudaSetDevice(1), "cudaSetDevice");
  check(cudaDeviceEnablePeerAccess(0, 0), "cudaDeviceEnablePeerAccess");
  check(cudaSetDevice(0), "cudaSetDevice");
  check(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  return 2;
}

}  // namespace
