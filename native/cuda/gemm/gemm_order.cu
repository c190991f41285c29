#include <algorithm>

#include "cuda/device/check.h"
#include "cuda/gemm/gemm_order.h"

namespace refit::cuda {
namespace {

constexpr int kOrderThreads = 256, kBlocks = 1024;

// The mixer of splitmix64 (Steele, Lea, Flood, 2014).
__device__ __forceinline__ uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

__global__ void fill_kernel(Element* to, int64_t rows, int64_t k, int64_t ld, float scale, bool opposed) {
  for (int64_t i = blockIdx.x * int64_t{kOrderThreads} + threadIdx.x; i < rows * k;
       i += int64_t{kBlocks} * kOrderThreads) {
    const int64_t row = i / k, at = i % k, mirrored = min(at, k - 1 - at);
    const uint64_t bits = mixed((row * 2 + opposed) * k + mirrored + 0x9e3779b97f4a7c15ull);
    const float value = static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f * scale;
    to[row * ld + at] = to_element(opposed && at != mirrored ? -value : value);
  }
}

__device__ __forceinline__ uint32_t bits_of(Element v) { return element_bits(v); }
__device__ __forceinline__ uint32_t bits_of(float v) { return __float_as_uint(v); }

// Adds up a hash of all elements of y and their places.
template <class Out>
__global__ void digest_kernel(const Out* y, int64_t rows, int64_t columns, int64_t ld, unsigned long long* to) {
  uint64_t sum = 0;
  for (int64_t i = blockIdx.x * int64_t{kOrderThreads} + threadIdx.x; i < rows * columns;
       i += int64_t{kBlocks} * kOrderThreads) {
    sum += mixed(static_cast<uint64_t>(i) << 32 | bits_of(y[i / columns * ld + i % columns]));
  }
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) atomicAdd(to, static_cast<unsigned long long>(sum));
}

template <class Out>
void add_digest(const Out* y, const GemmShape& s, uint64_t* to, cudaStream_t stream) {
  digest_kernel<<<kBlocks, kOrderThreads, 0, stream>>>(y, s.m, s.n, s.ldy, reinterpret_cast<unsigned long long*>(to));
  check_launch("digest of a sample");
}

Product sample_of(const Product& p, int64_t columns, const Element* w, const Element* bias) {
  const GemmShape shape{p.shape.m, columns, p.shape.k, p.shape.ldx, p.shape.ldy};
  if (p.wide) return {shape, p.x, w, bias, static_cast<float*>(p.y)};
  return {shape, p.x, w, bias, static_cast<Element*>(p.y)};
}

}  // namespace

void fill_sample(Element* to, int64_t rows, int64_t k, int64_t ld, float scale, bool opposed, cudaStream_t stream) {
  fill_kernel<<<kBlocks, kOrderThreads, 0, stream>>>(to, rows, k, ld, scale, opposed);
  check_launch("fill a sample");
}

OrderSample::OrderSample(const Product& p, void* memory, size_t bytes, cudaStream_t stream)
    : product_(sample_of(p, 0, nullptr, nullptr)), stream_(stream) {
  constexpr int64_t kHeader = 256, kUnit = 128, kMostColumns = 1024;
  // The rounding errors must be far from fp16's subnormal numbers; a bias is as large as they are.
  constexpr float kScale = of_element(1.0f, 32.0f), kBias = 0x1p-14f * kScale * kScale;
  const int64_t k = p.shape.k, room = static_cast<int64_t>(bytes) - kHeader;
  int64_t columns = std::min({p.shape.n, kMostColumns, std::max<int64_t>(0, room / (2 * k + 2))});
  if (columns > kUnit) columns = columns / kUnit * kUnit;
  if (columns < std::min(p.shape.n, kUnit)) return;
  auto* const w = reinterpret_cast<Element*>(static_cast<uint8_t*>(memory) + kHeader);
  // Behind w, whose rows are multiples of 16 bytes.
  Element* const bias = p.bias == nullptr ? nullptr : w + columns * k;
  digest_ = static_cast<uint64_t*>(memory);
  product_ = sample_of(p, columns, w, bias);
  fill_sample(const_cast<Element*>(p.x), p.shape.m, k, p.shape.ldx, kScale, false, stream);
  fill_sample(w, columns, k, k, kScale, true, stream);
  if (bias != nullptr) fill_sample(bias, 1, columns, columns, kBias, false, stream);
}

void OrderSample::clear() const {
  const size_t each = product_.wide ? sizeof(float) : sizeof(Element);
  check(cudaMemset2DAsync(product_.y, product_.shape.ldy * each, 0xff, product_.shape.n * each, product_.shape.m,
                          stream_),
        "clear a sample");
}

uint64_t OrderSample::digest() const {
  check(cudaMemsetAsync(digest_, 0, sizeof *digest_, stream_), "clear a digest");
  if (product_.wide) {
    add_digest(static_cast<const float*>(product_.y), product_.shape, digest_, stream_);
  } else {
    add_digest(static_cast<const Element*>(product_.y), product_.shape, digest_, stream_);
  }
  uint64_t sum = 0;
  check(cudaMemcpyAsync(&sum, digest_, sizeof sum, cudaMemcpyDeviceToHost, stream_), "read a digest");
  check(cudaStreamSynchronize(stream_), "a sample");
  return sum;
}

}  // namespace refit::cuda
