// Facts about operands by which the launchers of the small kernels choose.
#pragma once
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

// Whether 8 elements at a time can be moved: all rows begin at multiples of 16 bytes. Null pointers do not count.
template <class... P>
bool in_eights(int64_t columns, const P*... pointers) {
  return columns % 8 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace refit::cuda
