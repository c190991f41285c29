#include "cuda/adapters/adapter_pass.h"

#include <algorithm>
#include <utility>

#include "cuda/device/check.h"
#include "cuda/forward/elementwise.h"

namespace refit::cuda {

namespace {

// Up to so many rows of a step, the base products are the streaming kernel's, which leaves room on all multiprocessors.
constexpr int kBesideRows = 16;
// From so many rows of adapters on, both kernels have enough to do for themselves.
constexpr int kApartFrom = 512;

}  // namespace

AdapterPass::AdapterPass(const Layout& layout, const std::vector<const Element*>& params, Element* t,
                         cudaStream_t stream)
    : layout_(layout), params_(params), t_(t), stream_(stream) {
  if (layout.adapters.slots == 0) return;
  prepare_adapters();
  int least = 0, most = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &most), "the adapters' stream");
  check(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, least), "the adapters' stream");
  for (cudaEvent_t* event : {&ready_, &done_}) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "an event of the adapters");
  }
}

AdapterPass::~AdapterPass() {
  if (beside_ == nullptr) return;
  cudaStreamDestroy(beside_);
  for (cudaEvent_t event : {ready_, done_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

AdapterWeights AdapterPass::weights(const AdaptedProduct& product) const {
  const AdapterLayout& adapters = layout_.adapters;
  AdapterWeights w{};
  w.a = params_[product.pair.a];
  w.b = params_[product.pair.b];
  w.table = reinterpret_cast<const float*>(params_[adapters.table]) + 2 * product.table_row;
  w.slot_floats = 2 * int64_t{adapters.rows_of_slot()};
  w.rank = adapters.rank;
  w.slices = product.slices;
  std::copy(std::begin(product.columns), std::end(product.columns), w.columns);
  return w;
}

void AdapterPass::start(const AdaptedProduct& product, const Element* x) {
  if (!active(product.pair)) return;
  const AdapterWeights w = weights(product);
  x_ = x;
  order_ = rows_ <= kBesideRows || adapter_fits_beside(w, segments_, product.depth) ? Order::kShrinkBeside
           : segments_.rows < kApartFrom                                            ? Order::kProductBeside
                                                                                    : Order::kShrinkFirst;
  if (order_ != Order::kShrinkFirst) check(cudaEventRecord(ready_, stream_), "fork the adapters' stream");
  if (order_ != Order::kShrinkBeside) adapter_shrink(w, segments_, x, product.depth, t_, stream_);
  if (order_ == Order::kProductBeside) check(cudaStreamWaitEvent(beside_, ready_), "fork the adapters' stream");
}

// The base product has been launched: its blocks get multiprocessors first if shrink runs beside it. The next kernel
// waits for both, and may still begin early: its own wait is for all kernels that it depends on.
void AdapterPass::join(const AdapterWeights& w, const AdaptedProduct& product) {
  const Order order = std::exchange(order_, Order::kShrinkFirst);
  if (order == Order::kShrinkFirst) return;
  if (order == Order::kShrinkBeside) {
    check(cudaStreamWaitEvent(beside_, ready_), "fork the adapters' stream");
    adapter_shrink(w, segments_, x_, product.depth, t_, beside_, true);
  }
  check(cudaEventRecord(done_, beside_), "join the adapters' stream");
  check(cudaStreamWaitEvent(stream_, done_), "join the adapters' stream");
}

template <class Out>
void AdapterPass::add(const AdaptedProduct& product, Out* y, int64_t ldy) {
  if (!active(product.pair)) return;
  const AdapterWeights w = weights(product);
  join(w, product);
  adapter_expand(w, segments_, t_, y, ldy, stream_);
}

void AdapterPass::finish(const AdaptedProduct& product, Element* y, int64_t ldy) { add(product, y, ldy); }
void AdapterPass::finish(const AdaptedProduct& product, float* y, int64_t ldy) { add(product, y, ldy); }

void AdapterPass::finish_activated(const AdaptedProduct& product, Element* gate_up, Element* act, int64_t rows) {
  const Activation activation = layout_.recipe.activation;
  const int64_t inter = product.columns[0];
  if (active(product.pair)) {
    const AdapterWeights w = weights(product);
    if (adapter_activates(w, gate_up, act)) {
      join(w, product);
      return adapter_activate(activation, w, segments_, t_, gate_up, act, stream_);
    }
    add(product, gate_up, 2 * inter);
  }
  activate_mul(activation, gate_up, act, rows, inter, stream_);
}

void AdapterPass::embed(const int32_t* tokens, int64_t first_row, int64_t vocab_rows, Element* y) {
  const AdapterLayout& adapters = layout_.adapters;
  if (!active(adapters.embed)) return;
  const int64_t hidden = layout_.recipe.hidden;
  const AdapterWeights w = weights({adapters.embed, adapters.embed_row(), 1, {hidden}, 0});
  adapter_gather(w, segments_, tokens, first_row, vocab_rows, t_, stream_);
  adapter_expand(w, segments_, t_, y, hidden, stream_);
}

AdaptedProduct AdapterPass::qkv(int layer) const {
  return {layout_.layers[layer].qkv_adapter,
          layout_.adapters.row(layer, kAdaptQ),
          3,
          {layout_.q_cols(), layout_.kv_cols(), layout_.kv_cols()},
          layout_.recipe.hidden};
}

AdaptedProduct AdapterPass::o(int layer) const {
  return {layout_.layers[layer].o_adapter,
          layout_.adapters.row(layer, kAdaptO),
          1,
          {layout_.outputs},
          layout_.input_cols(layout_.q_cols())};
}

AdaptedProduct AdapterPass::gate_up(int layer) const {
  const LayerParams& p = layout_.layers[layer];
  return {p.gate_up_adapter, layout_.adapters.row(layer, kAdaptGate), 2, {p.inter, p.inter}, layout_.recipe.hidden};
}

AdaptedProduct AdapterPass::down(int layer) const {
  const LayerParams& p = layout_.layers[layer];
  return {p.down_adapter, layout_.adapters.row(layer, kAdaptDown), 1, {layout_.outputs}, layout_.input_cols(p.inter)};
}

AdaptedProduct AdapterPass::lm_head() const {
  const AdapterLayout& adapters = layout_.adapters;
  return {adapters.lm_head, adapters.lm_head_row(), 1, {layout_.vocab_rows}, layout_.recipe.hidden};
}

MoeAdapters AdapterPass::experts(int layer, const int32_t* token_slots) const {
  const LayerParams& p = layout_.layers[layer];
  if (!active(p.gate_up_adapter) && !active(p.down_adapter)) return {};
  const auto param = [this](int id) { return id < 0 ? nullptr : params_[id]; };
  const AdapterLayout& adapters = layout_.adapters;
  return {param(p.gate_up_adapter.a),
          param(p.gate_up_adapter.b),
          param(p.down_adapter.a),
          param(p.down_adapter.b),
          reinterpret_cast<const float*>(params_[adapters.table]) + 2 * adapters.row(layer, kAdaptGate),
          2 * int64_t{adapters.rows_of_slot()},
          token_slots};
}

int64_t adapter_columns(const Layout& layout) {
  const AdapterLayout& adapters = layout.adapters;
  int slices = adapters.embed.exists() || adapters.lm_head.exists() ? 1 : 0;
  for (const LayerParams& p : layout.layers) {
    if (p.qkv_adapter.exists()) slices = std::max(slices, 3);
    if (p.o_adapter.exists()) slices = std::max(slices, 1);
    if (p.sparse()) continue;
    if (p.gate_up_adapter.exists()) slices = std::max(slices, 2);
    if (p.down_adapter.exists()) slices = std::max(slices, 1);
  }
  return int64_t{slices} * adapters.rank;
}

}  // namespace refit::cuda
