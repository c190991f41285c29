// LoRA adapters (core/adapters.h) of the dense linears: y += scale * (x Aᵀ) Bᵀ for the rows of each adapter.
//
// Two kernels: shrink computes t = x Aᵀ (fp32 sums, rounded to Element), expand adds scale * t Bᵀ to y. Scale and
// rank come from the table on the GPU at run time, so a slot can be rewritten between steps. The bits of a row depend
// on its x and its adapter only: neither on the other rows of the step nor on the tiles that the launcher chooses.
#pragma once
#include <cstdint>

#include "core/model.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// Adjacent rows of a step that use one adapter slot; -1: the base model alone.
struct AdapterSegment {
  int32_t slot, first, rows;
};
constexpr int kAdapterSegmentRows = 64;  // the most rows of a segment

// The segments of one product. Those with a slot come first. A launch depends on the numbers only, and reads the list
// when it runs, if `host` is null. The numbers may then be rounded up, as a graph needs: segments that are padding have
// no rows.
struct AdapterSegments {
  const AdapterSegment* list = nullptr;  // on the GPU
  const AdapterSegment* host = nullptr;  // the same on the host, until the launch; or null
  int count = 0, base_count = 0;
  int rows = 0;       // of all segments with a slot
  int most_rows = 0;  // of one of them
};

// Slices are linears that share x and the rows of y: q, k, v; gate, up.
constexpr int kMostAdapterSlices = 3;

struct AdapterWeights {
  const Element* a;     // [slots * slices * rank, K]
  const Element* b;     // [slots * all columns, rank]
  const float* table;   // the row of the first slice in slot 0; the other slices follow
  int64_t slot_floats;  // of the table, from slot to slot
  int rank;             // of the slots, a multiple of 16
  int slices;
  int64_t columns[kMostAdapterSlices];  // of y, in the order of the slices

  int64_t all_columns() const {
    int64_t sum = 0;
    for (int i = 0; i < slices; ++i) sum += columns[i];
    return sum;
  }
};

// t [rows, slices * rank] = x Aᵀ; x [rows, K]. Only the columns below each adapter's own rank (rounded up to 16) are
// written.
// beside: other kernels leave it a few multiprocessors only.
void adapter_shrink(const AdapterWeights& w, const AdapterSegments& segments, const Element* x, int64_t K, Element* t,
                    cudaStream_t stream, bool beside = false);
// Whether shrink probably ends before the library's base product if both begin together and it gets only the
// multiprocessors that the base product leaves idle.
bool adapter_fits_beside(const AdapterWeights& w, const AdapterSegments& segments, int64_t K);

// y [rows, ldy] += scale * t Bᵀ, in fp32, rounded once. Out: Element or float. It begins early, here and below, and
// loads B while the kernels end that the stream waits for.
template <class Out>
void adapter_expand(const AdapterWeights& w, const AdapterSegments& segments, const Element* t, Out* y, int64_t ldy,
                    cudaStream_t stream);

// Whether adapter_activate can read these operands.
bool adapter_activates(const AdapterWeights& w, const Element* gate_up, const Element* act);
// act [rows, columns[0]] = activation(gate) * up of all rows of the step, base ones too, with both slices as
// adapter_expand leaves them in gate_up [rows, 2 columns[0]]; gate_up is only read.
void adapter_activate(Activation activation, const AdapterWeights& w, const AdapterSegments& segments, const Element* t,
                      const Element* gate_up, Element* act, cudaStream_t stream);

// t [rows, rank] = the rows of `a` [slots * vocab_rows, rank] that tokens - first_row name; zeros for tokens of other
// ranks.
void adapter_gather(const AdapterWeights& w, const AdapterSegments& segments, const int32_t* tokens, int64_t first_row,
                    int64_t vocab_rows, Element* t, cudaStream_t stream);

// Loads the kernels onto the current GPU; call it before the first launch.
void prepare_adapters();

}  // namespace refit::cuda
