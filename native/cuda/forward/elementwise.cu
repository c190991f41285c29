#include <algorithm>

#include "cuda/device/early_launch.cuh"
#include "cuda/forward/elementwise.h"
#include "cuda/forward/elementwise_host.h"
#include "cuda/forward/elementwise_math.cuh"

namespace refit::cuda {
namespace {

// blockIdx.x: the token; N elements at a time.
template <int N>
__global__ void __launch_bounds__(256) embed_kernel(const int32_t* tokens, const Element* table, int64_t first_row,
                                                    int64_t rows, int hidden, Element* out) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int64_t row = tokens[blockIdx.x] - first_row;
  const bool here = row >= 0 && row < rows;
  const Element* from = table + (here ? row : 0) * hidden;
  Element* to = out + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
    Elements<N> x;
    for (int e = 0; e < N; ++e) x.v[e] = Element(0.0f);
    if (here) x = Elements<N>::load(from + i);
    x.store(to + i);
  }
}

// blockIdx.y: the row, in strides of gridDim.y; N elements a thread.
template <Activation kActivation, int N>
__global__ void __launch_bounds__(128)
    activate_mul_kernel(const Element* x, Element* out, int64_t count, int64_t inter) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= inter) return;
  for (int64_t row = blockIdx.y; row < count; row += gridDim.y) {
    const Element* gates = x + row * 2 * inter + i;
    const Elements<N> gate = Elements<N>::load(gates), up = Elements<N>::load(gates + inter);
    Elements<N> y;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float act = round_element(activated_as_cpu<kActivation>(to_float(gate.v[e])));
      y.v[e] = to_element(__fmul_rn(act, to_float(up.v[e])));
    }
    y.store(out + row * inter + i);
  }
}

// Number of threads for `items` items: whole warps, at most `most`.
int threads_for(int64_t items, int most) {
  return static_cast<int>(std::clamp<int64_t>((items + 31) / 32 * 32, 32, most));
}

template <Activation kActivation, int N>
void launch_activate_mul(const Element* x, Element* out, int64_t count, int64_t inter, cudaStream_t stream) {
  const int64_t vectors = (inter + N - 1) / N;
  const int threads = threads_for(vectors, 128);
  const dim3 grid(static_cast<unsigned>((vectors + threads - 1) / threads),
                  static_cast<unsigned>(std::min<int64_t>(count, 65535)));
  launch_early(activate_mul_kernel<kActivation, N>, true, grid, threads, stream, "activate_mul", x, out, count, inter);
}

template <Activation kActivation>
void launch_activate_mul(const Element* x, Element* out, int64_t count, int64_t inter, cudaStream_t stream) {
  if (in_eights(inter, x, out)) {
    launch_activate_mul<kActivation, 8>(x, out, count, inter, stream);
  } else {
    launch_activate_mul<kActivation, 1>(x, out, count, inter, stream);
  }
}

}  // namespace

void embed(const int32_t* tokens, int count, const Element* table, int64_t first_row, int64_t rows, int hidden,
           Element* out, cudaStream_t stream) {
  if (count <= 0) return;
  const bool eights = in_eights(hidden, table, out);
  launch_early(eights ? embed_kernel<8> : embed_kernel<1>, true, count, threads_for(eights ? hidden / 8 : hidden, 256),
               stream, "embed", tokens, table, first_row, rows, hidden, out);
}

void activate_mul(Activation activation, const Element* x, Element* out, int64_t count, int64_t inter,
                  cudaStream_t stream) {
  if (count <= 0 || inter <= 0) return;
  if (activation == Activation::kSilu) {
    launch_activate_mul<Activation::kSilu>(x, out, count, inter, stream);
  } else {
    launch_activate_mul<Activation::kGeluTanh>(x, out, count, inter, stream);
  }
}

}  // namespace refit::cuda
