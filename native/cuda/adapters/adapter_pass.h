// The adapters' part of a step on one rank: which kernels run beside and after a linear of the base model.
//
// shrink needs only the linear's input. If the base product leaves room for it, it runs on a stream of its own beside
// that. Else it begins before the product and loads A while the kernel before it ends; unless it is large, the product
// is on the other stream then and takes multiprocessors as they become free, instead of waiting for the last of them.
// expand then adds to the product's result. A step without adapters launches nothing here.
#pragma once
#include <cuda_runtime_api.h>

#include <vector>

#include "core/layout.h"
#include "cuda/adapters/adapters.h"
#include "cuda/moe/moe.h"

namespace refit::cuda {

// One linear of a layer, or several that share their input.
struct AdaptedProduct {
  AdapterPair pair;
  int table_row = 0;  // of the first slice, in a slot
  int slices = 1;
  int64_t columns[kMostAdapterSlices] = {};
  int64_t depth = 0;  // columns of A
};

// Used on the rank's thread, with its GPU current; `t` has adapter_columns(layout) elements for each row of a step.
class AdapterPass {
 public:
  AdapterPass(const Layout& layout, const std::vector<const Element*>& params, Element* t, cudaStream_t stream);
  ~AdapterPass();
  AdapterPass(const AdapterPass&) = delete;
  AdapterPass& operator=(const AdapterPass&) = delete;

  // Starts a step, or a block of rows of its head, of so many rows in all.
  void begin(const AdapterSegments& segments, int rows) { segments_ = segments, rows_ = rows; }
  bool active(const AdapterPair& pair) const { return segments_.count > 0 && pair.exists(); }

  // Call it before the base product, which goes to product_stream(), and `finish` after it. x [rows, depth] must stay
  // until then.
  void start(const AdaptedProduct& product, const Element* x);
  cudaStream_t product_stream() const { return order_ == Order::kProductBeside ? beside_ : stream_; }
  // Adds the adapters' part to y, the base product's result.
  void finish(const AdaptedProduct& product, Element* y, int64_t ldy);
  void finish(const AdaptedProduct& product, float* y, int64_t ldy);
  // The same for gate and up, whose activation act [rows, inter] is computed, too.
  void finish_activated(const AdaptedProduct& product, Element* gate_up, Element* act, int64_t rows);
  // Adds the adapters' part of the embedding to y [rows, hidden].
  void embed(const int32_t* tokens, int64_t first_row, int64_t vocab_rows, Element* y);

  AdaptedProduct qkv(int layer) const;
  AdaptedProduct o(int layer) const;
  AdaptedProduct gate_up(int layer) const;
  AdaptedProduct down(int layer) const;
  AdaptedProduct lm_head() const;
  // A sparse layer computes its experts' adapters among its own products.
  MoeAdapters experts(int layer, const int32_t* token_slots) const;

 private:
  enum class Order { kShrinkFirst, kShrinkBeside, kProductBeside };

  void join(const AdapterWeights& w, const AdaptedProduct& product);
  AdapterWeights weights(const AdaptedProduct& product) const;
  template <class Out>
  void add(const AdaptedProduct& product, Out* y, int64_t ldy);

  const Layout& layout_;
  const std::vector<const Element*>& params_;
  Element* const t_;
  const cudaStream_t stream_;
  cudaStream_t beside_ = nullptr;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
  AdapterSegments segments_;
  int rows_ = 0;  // of the step, or of the head's block
  Order order_ = Order::kShrinkFirst;
  const Element* x_ = nullptr;  // of a shrink that waits for the base product's launch
};

// Elements of t for one row: the widest linear's; 0: no linear takes adapters.
int64_t adapter_columns(const Layout& layout);

}  // namespace refit::cuda
