// cuBLASLt loads its kernels before the products run, not during them.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda/device/check.h"
#include "cuda/gemm/gemm.h"
#include "test/gpu/kernels/matrix_kernels.h"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {
namespace {

using cuda::Gemm;
using cuda::GemmShape;
using cuda::Product;

constexpr size_t kWorkspace = 32 << 20;

// Blocks a GPU until it is released, or for 20 s.
class Held {
 public:
  Held() {
    cuda::check(cudaHostAlloc(&word_, sizeof *word_, cudaHostAllocMapped), "cudaHostAlloc");
    *word_ = 0;
    launch_hold(word_);
    patience_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::seconds(20), [this] { return free_; });
      gave_up_ = !free_;
      *static_cast<volatile uint32_t*>(word_) = 1;
    });
  }
  ~Held() {
    let_go();
    cudaDeviceSynchronize();
    cudaFreeHost(word_);
  }
  // Releases the GPU; returns whether it was still blocked.
  bool let_go() {
    {
      const std::lock_guard lock(mutex_);
      free_ = true;
    }
    changed_.notify_one();
    if (patience_.joinable()) patience_.join();
    return !gave_up_;
  }

 private:
  uint32_t* word_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool free_ = false, gave_up_ = false;
  std::thread patience_;
};

// A late rank must be able to launch its products while its own GPU, or another one, waits for it.
void test_loaded_products_do_not_wait(uint64_t seed) {
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace);
  const int64_t n = 1536, k = 512, most = 3000;
  Buffer<Element> x(most * k), w(n * k), bias(n), y(most * n);
  Buffer<float> wide(most * n);
  fill(x.data(), most, k, k, 1.0f, seed);
  fill(w.data(), n, k, k, 1.0f, seed + 1);
  fill(bias.data(), 1, n, n, 1.0f, seed + 2);
  for (const int64_t m : {3, 17, 40, 64, 300, 3000}) {
    const GemmShape shape{m, n, k, k, n};
    for (const Product& product : {Product(shape, x.data(), w.data(), nullptr, y.data()),
                                   Product(shape, x.data(), w.data(), bias.data(), y.data()),
                                   Product(shape, x.data(), w.data(), nullptr, wide.data())}) {
      gemm.load(product, nullptr);
      synchronize("load");
      Held held;
      gemm.run(product, nullptr);
      CHECKF(held.let_go(), "m=%lld%s%s: waits for the GPU", static_cast<long long>(m), product.wide ? " float" : "",
             product.bias != nullptr ? " bias" : "");
    }
  }
}

void test_unloaded_products_are_refused(uint64_t seed) {
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace);
  gemm.require_loaded();
  const int64_t n = 256, k = 128;
  Buffer<Element> x(40 * k), w(n * k), y(40 * n), loaded(40 * n);
  fill(x.data(), 40, k, k, 1.0f, seed);
  fill(w.data(), n, k, k, 1.0f, seed + 1);
  const auto product = [&](int64_t m, Buffer<Element>& to) {
    return Product({m, n, k, k, n}, x.data(), w.data(), nullptr, to.data());
  };
  gemm.run(product(16, y), nullptr);  // runs on our own kernel
  std::string what;
  try {
    gemm.run(product(40, y), nullptr);
  } catch (const std::logic_error& error) {
    what = error.what();
  }
  CHECKF(!gemm.has_library() || what.find("40 x 256 x 128 was not loaded") != std::string::npos, "\"%s\"",
         what.c_str());
  gemm.load(product(40, loaded), nullptr);
  gemm.run(product(40, y), nullptr);
  synchronize("loaded");
  CHECK(!gemm.has_library() || std::memcmp(y.get().data(), loaded.get().data(), y.bytes()) == 0);
}

}  // namespace
}  // namespace refit::test
