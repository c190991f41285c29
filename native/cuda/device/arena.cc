#include "cuda/device/arena.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/memory_error.h"
#include "cuda/device/driver.h"

namespace refit::cuda {
namespace {

CUmemAllocationProp memory_of(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

std::string megabytes(size_t bytes) { return std::to_string((bytes + 999999) / 1000000) + " MB"; }

[[noreturn]] void full(int device, size_t bytes) {
  cudaGetLastError();  // clear the allocation's own error, or a later check would find it
  size_t free = 0, total = 0;
  const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
  throw NoMemory("GPU " + std::to_string(device) + " is full: " + megabytes(bytes) + " were requested" +
                 (known ? ", " + megabytes(free) + " of " + megabytes(total) + " are free" : ""));
}

}  // namespace

Arena::Arena(int device, size_t bytes, const std::vector<int>& peers) : device_(device), bytes_(bytes), peers_(peers) {
  peers_.push_back(device);
  std::sort(peers_.begin(), peers_.end());
  peers_.erase(std::unique(peers_.begin(), peers_.end()), peers_.end());
  resident_ = bytes == 0;
  if (bytes == 0) return;
  const CurrentDevice current(device);
  virtual_ = device_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  if (!virtual_) {
    // Some virtual machines have no virtual memory management. Peers reach this memory where peer access is enabled.
    void* plain = nullptr;
    const cudaError_t code = cudaMalloc(&plain, bytes);
    if (code == cudaErrorMemoryAllocation) full(device, bytes);
    check(code, "cudaMalloc");
    data_ = static_cast<uint8_t*>(plain);
    mapped_ = bytes;
    resident_ = true;
    return;
  }
  const CUmemAllocationProp prop = memory_of(device);
  size_t granularity = 0;
  check(driver().granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity");
  if (kChunk % granularity != 0) {
    throw std::runtime_error("GPU " + std::to_string(device) + " maps memory in pieces of " +
                             std::to_string(granularity) + " bytes, which do not divide " + std::to_string(kChunk));
  }
  mapped_ = (bytes + granularity - 1) / granularity * granularity;
  CUdeviceptr address = 0;
  check(driver().address_reserve(&address, mapped_, 0, 0, 0), "cuMemAddressReserve");
  data_ = reinterpret_cast<uint8_t*>(address);
  try {
    resume();
  } catch (...) {
    free_all();  // the destructor does not run after an exception
    throw;
  }
}

Arena::~Arena() { free_all(); }

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(virtual_, other.virtual_);
  std::swap(resident_, other.resident_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(used_, other.used_);
  std::swap(mapped_, other.mapped_);
  std::swap(chunks_, other.chunks_);
  std::swap(peers_, other.peers_);
  return *this;
}

void* Arena::carve(size_t bytes) {
  const size_t take = padded(bytes);
  if (take < bytes || take > padded(bytes_) - used_) {
    throw NoMemory("an arena of " + std::to_string(bytes_) + " bytes has " + std::to_string(padded(bytes_) - used_) +
                   " left, " + std::to_string(bytes) + " were requested");
  }
  void* const p = data_ + used_;
  used_ += take;
  return p;
}

size_t Arena::release() {
  if (!resident_ || bytes_ == 0) return 0;
  if (!virtual_) {
    throw std::runtime_error("GPU " + std::to_string(device_) +
                             " has no virtual memory management: its memory cannot be released while the engine lives");
  }
  const CurrentDevice current(device_);
  check(static_cast<CUresult>(unmap()), "cuMemUnmap");
  return mapped_;
}

void Arena::resume() {
  if (resident_) return;
  const CurrentDevice current(device_);
  const CUmemAllocationProp prop = memory_of(device_);
  const CUdeviceptr base = reinterpret_cast<CUdeviceptr>(data_);
  try {
    for (size_t at = 0; at < mapped_; at += kChunk) {
      const size_t size = std::min(kChunk, mapped_ - at);
      CUmemGenericAllocationHandle handle = 0;
      const CUresult code = driver().create(&handle, size, &prop, 0);
      if (code == CUDA_ERROR_OUT_OF_MEMORY) {
        unmap();  // first, so that the message reports what is free without this arena
        full(device_, mapped_);
      }
      check(code, "cuMemCreate");
      const CUresult mapped = driver().map(base + at, size, 0, handle, 0);
      if (mapped != CUDA_SUCCESS) driver().release(handle);
      check(mapped, "cuMemMap");
      chunks_.push_back(handle);
    }
    std::vector<CUmemAccessDesc> access;
    for (const int peer : peers_) {
      CUmemAccessDesc desc{};
      desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      desc.location.id = peer;
      desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      access.push_back(desc);
    }
    const CUresult code = driver().set_access(base, mapped_, access.data(), access.size());
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
      unmap();
      full(device_, mapped_);
    }
    check(code, "cuMemSetAccess");
  } catch (...) {
    unmap();
    throw;
  }
  resident_ = true;
}

// Chunk by chunk: a range must be unmapped as it was mapped.
int Arena::unmap() noexcept {
  int failed = 0;
  const auto keep = [&](CUresult code) {
    if (failed == 0) failed = code;
  };
  const CUdeviceptr base = reinterpret_cast<CUdeviceptr>(data_);
  for (size_t i = 0; i < chunks_.size(); i++) {
    const size_t at = i * kChunk;
    keep(driver().unmap(base + at, std::min(kChunk, mapped_ - at)));
    keep(driver().release(chunks_[i]));
  }
  chunks_.clear();
  resident_ = false;
  return failed;
}

void Arena::free_all() noexcept {
  if (data_ == nullptr) return;
  if (virtual_) {
    unmap();
    driver().address_free(reinterpret_cast<CUdeviceptr>(data_), mapped_);
  } else {
    cudaFree(data_);
  }
  data_ = nullptr;
}

}  // namespace refit::cuda
