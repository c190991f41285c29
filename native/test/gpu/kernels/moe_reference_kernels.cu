#include <cuda_runtime.h>

#include <cmath>

#include "cuda/device/check.h"
#include "test/gpu/kernels/moe_reference_kernels.h"

namespace refit::test {
namespace {

using cuda::double_to_element;
using cuda::Element;
using cuda::to_element;
using cuda::to_float;

__global__ void gate_up_kernel(const Element* x, const Element* w13, const int32_t* ids, int k, int64_t hidden,
                               int64_t inter, bool gelu, Element* act) {
  const int64_t pair = blockIdx.y, i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= inter) return;
  const Element* row = x + pair / k * hidden;
  const Element* gate = w13 + (ids[pair] * 2 * inter + i) * hidden;
  const Element* up = gate + inter * hidden;
  double g = 0, u = 0;
  for (int64_t h = 0; h < hidden; h++) {
    g += static_cast<double>(to_float(row[h])) * to_float(gate[h]);
    u += static_cast<double>(to_float(row[h])) * to_float(up[h]);
  }
  const float rg = to_float(double_to_element(g)), ru = to_float(double_to_element(u));
  const double z = rg;
  const double wide = gelu ? z / 2 * (1.0 + tanh(sqrt(2.0 / M_PI) * (z + 0.044715 * z * z * z))) : z / (1.0 + exp(-z));
  act[pair * inter + i] = to_element(to_float(double_to_element(wide)) * ru);
}

__global__ void down_kernel(const Element* act, const Element* w2, const int32_t* ids, int64_t hidden, int64_t inter,
                            double* out) {
  const int64_t pair = blockIdx.y, h = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (h >= hidden) return;
  const Element* row = w2 + (ids[pair] * hidden + h) * inter;
  double sum = 0;
  for (int64_t i = 0; i < inter; i++) {
    sum += static_cast<double>(to_float(act[pair * inter + i])) * to_float(row[i]);
  }
  out[pair * hidden + h] = sum;
}

__global__ void half_kernel(const Element* w13, const Element* w2, int rank, int64_t experts, int64_t hidden,
                            int64_t inter, Element* half13, Element* half2) {
  const int64_t part = inter / 2, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (int64_t i = first; i < experts * 2 * part * hidden; i += stride) {
    const int64_t row = i / hidden;
    half13[i] = w13[(row / part * inter + rank * part + row % part) * hidden + i % hidden];
  }
  for (int64_t i = first; i < experts * hidden * part; i += stride) {
    half2[i] = w2[i / part * inter + rank * part + i % part];
  }
}

}  // namespace

void launch_gate_up(unsigned pairs, const Element* x, const Element* w13, const int32_t* ids, int k, int64_t hidden,
                    int64_t inter, bool gelu, Element* act) {
  gate_up_kernel<<<dim3(static_cast<unsigned>(inter + 127) / 128, pairs), 128>>>(x, w13, ids, k, hidden, inter, gelu,
                                                                                 act);
  cuda::check_launch("gate_up_kernel");
}

void launch_down(unsigned pairs, const Element* act, const Element* w2, const int32_t* ids, int64_t hidden,
                 int64_t inter, double* out) {
  down_kernel<<<dim3(static_cast<unsigned>(hidden + 127) / 128, pairs), 128>>>(act, w2, ids, hidden, inter, out);
  cuda::check_launch("down_kernel");
}

void launch_half(const Element* w13, const Element* w2, int rank, int64_t experts, int64_t hidden, int64_t inter,
                 Element* half13, Element* half2) {
  half_kernel<<<1024, 256>>>(w13, w2, rank, experts, hidden, inter, half13, half2);
  cuda::check_launch("half_kernel");
}

}  // namespace refit::test
