#include "cuda/moe/moe.h"

#include <stdexcept>
#include <string>

#include "cuda/device/current_gpu.h"
#include "cuda/moe/moe_kernels.h"

namespace refit::cuda {
namespace {

// Tokens of one turn. It limits the scratch of a long prefill; an expert's weights are then read once per turn.
constexpr int64_t kTurnTokens = 8192;

// Average rows per expert from which the larger of two kernels is used.
constexpr int64_t kTileFrom = 8, kLargeTileFrom = 96, kManyFrom = 32;

void check_shape(const MoeShape& s) {
  const auto fail = [](const std::string& why) { throw std::invalid_argument("mixture of experts: " + why); };
  if (s.experts < 1 || s.experts > kMaxExperts)
    fail(std::to_string(s.experts) + " experts; 1 to " + std::to_string(kMaxExperts) + " are supported");
  if (s.per_token < 1 || s.per_token > std::min(s.experts, kMaxPerToken))
    fail(std::to_string(s.per_token) + " experts per token of " + std::to_string(s.experts) + "; 1 to " +
         std::to_string(std::min(s.experts, kMaxPerToken)) + " are supported");
  if (s.hidden < 1 || s.inter < 1) fail("hidden and intermediate sizes must be positive");
  if (s.hidden % s.gathered != 0)
    fail(std::to_string(s.gathered) + " ranks do not divide the hidden size of " + std::to_string(s.hidden));
}

}  // namespace

MoeScratch carve_moe_scratch(const MoeShape& s, int64_t tokens, void* base) {
  const int64_t pairs = tokens * s.per_token;
  size_t used = 0;
  const auto carve = [&](int64_t count, size_t size) {
    void* const at = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(base) + used);
    used += (static_cast<size_t>(count) * size + 255) / 256 * 256;
    return at;
  };
  MoeScratch scratch;
  scratch.logits = static_cast<Element*>(carve(tokens * s.experts, sizeof(Element)));
  scratch.ids = static_cast<int32_t*>(carve(pairs, sizeof(int32_t)));
  scratch.weights = static_cast<float*>(carve(pairs, sizeof(float)));
  scratch.slots = static_cast<int32_t*>(carve(pairs, sizeof(int32_t)));
  scratch.tokens = static_cast<int32_t*>(carve(pairs, sizeof(int32_t)));
  scratch.tiles = static_cast<RowTile*>(carve(max_row_tiles(pairs, s.experts, 8), sizeof(RowTile)));  // 8: most tiles
  scratch.tile_count = static_cast<int32_t*>(carve(1, sizeof(int32_t)));
  scratch.act = static_cast<Element*>(carve(pairs * s.depth(), sizeof(Element)));
  const bool adapts = s.adapter_rank > 0;
  scratch.out = carve(pairs * (adapts ? std::max(s.outputs(), 2 * s.inter) : s.outputs()), sizeof(float));
  scratch.delta = static_cast<float*>(scratch.out);
  scratch.shrunk = adapts ? static_cast<Element*>(carve(pairs * 2 * s.adapter_rank, sizeof(Element))) : nullptr;
  scratch.bytes = used;
  return scratch;
}

size_t Moe::scratch_bytes(const MoeShape& shape, int64_t tokens) {
  return carve_moe_scratch(shape, std::min(tokens, kTurnTokens), nullptr).bytes;
}

Moe::Moe(const MoeShape& shape, Gemm& gemm, void* scratch, size_t scratch_bytes)
    : shape_(shape), gemm_(gemm), scratch_(scratch), scratch_bytes_(scratch_bytes) {
  check_shape(shape);
  int64_t no = kTurnTokens + 1;  // turn_ tokens fit, `no` do not
  while (no - turn_ > 1) {
    const int64_t middle = (turn_ + no) / 2;
    (carve_moe_scratch(shape, middle, nullptr).bytes <= scratch_bytes ? turn_ : no) = middle;
  }
  if (turn_ == 0) {
    throw std::invalid_argument("mixture of experts: " + std::to_string(scratch_bytes) +
                                " bytes of scratch are too few; one token needs " +
                                std::to_string(Moe::scratch_bytes(shape, 1)));
  }
  prepare_moe_route();
  processors_ = multiprocessors();
  has_wgmma_ = cuda::has_wgmma();
  prepare_moe_gemm();
  if (has_wgmma_) prepare_wgmma_experts();
  if (shape.adapter_rank > 0) prepare_moe_adapters();
}

ExpertKernel Moe::choose(const Element* x, const Element* w13, const Element* w2, int64_t count) const {
  const int64_t rows = count * shape_.per_token / shape_.experts;
  ExpertKernel kernel = forced_;
  if (kernel == ExpertKernel::kAuto) {
    // The warps of the streaming kernels divide k, so they do not sum in ascending order.
    const bool may_stream = gemm_.order() == SumOrder::kAny;
    if (count <= 8 && may_stream) {  // an expert has at most as many rows as there are tokens
      kernel = ExpertKernel::kStream8;
    } else if (has_wgmma_) {
      kernel = rows <= kManyFrom ? ExpertKernel::kWgmma64 : ExpertKernel::kWgmma256;
    } else if (rows <= kTileFrom && may_stream) {
      kernel = ExpertKernel::kStream16;
    } else {
      kernel = rows < kLargeTileFrom ? ExpertKernel::kTile64 : ExpertKernel::kTile128;
    }
  }
  const bool wgmma = kernel == ExpertKernel::kWgmma64 || kernel == ExpertKernel::kWgmma256;
  const bool can = moe_rows_aligned(shape_, x, w13, w2) && (has_wgmma_ || !wgmma);
  return can ? kernel : ExpertKernel::kTile64;
}

int64_t Moe::gathers(int64_t count) { return 2 * ((count + kTurnTokens - 1) / kTurnTokens); }

int64_t Moe::gathered_rows(const MoeShape& shape, int64_t count) {
  return std::min(count, kTurnTokens) * shape.per_token;
}

template <class F>
void Moe::in_turns(int64_t count, F&& fn) const {
  const int64_t turns = (count + turn_ - 1) / turn_;
  for (int64_t i = 0; i < turns; i++) {
    const int64_t begin = count * i / turns, end = count * (i + 1) / turns;
    fn(begin, end - begin);
  }
}

void Moe::run(const Element* x, const Element* router, const Element* w13, const Element* w2, Element* y, int64_t count,
              bool partial, cudaStream_t stream, RouteRecord record, const MoeAdapters& adapters,
              const int32_t* kv_slots, const RowGather* gather) {
  in_turns(count, [&](int64_t begin, int64_t tokens) {
    RouteRecord part = record;
    if (record.to != nullptr) part.to += begin * record.stride;
    MoeAdapters own = adapters;
    if (own.token_slots != nullptr) own.token_slots += begin;
    run_turn(x + begin * shape_.hidden, router, w13, w2, y + begin * shape_.hidden, tokens, partial, stream, part, own,
             kv_slots == nullptr ? nullptr : kv_slots + begin, gather);
  });
}

void Moe::load(const Element* x, const Element* router, int64_t count, cudaStream_t stream) {
  in_turns(count, [&](int64_t begin, int64_t tokens) {
    gemm_.load(routing(x + begin * shape_.hidden, router, tokens), stream);
  });
}

Product Moe::routing(const Element* x, const Element* router, int64_t count) const {
  const GemmShape shape{count, shape_.experts, shape_.hidden, shape_.hidden, shape_.experts};
  return {shape, x, router, nullptr, carve_moe_scratch(shape_, count, scratch_).logits};
}

void Moe::run_turn(const Element* x, const Element* router, const Element* w13, const Element* w2, Element* y,
                   int64_t count, bool partial, cudaStream_t stream, RouteRecord record, const MoeAdapters& adapters,
                   const int32_t* kv_slots, const RowGather* gather) {
  const MoeScratch scratch = carve_moe_scratch(shape_, count, scratch_);
  const ExpertLaunch launch{choose(x, w13, w2, count), processors_};
  const int tile_rows = rows_of(launch.kernel);
  gemm_.run(routing(x, router, count), stream);
  choose_experts(shape_, scratch, count, stream, record, kv_slots);
  sort_by_expert(shape_, scratch, count, tile_rows, stream);
  const bool adapts = adapters.token_slots != nullptr, gate_up = adapts && adapters.a13 != nullptr;
  if (gate_up) adapt_gate_up(shape_, scratch, adapters, x, count, tile_rows, stream);
  MoeScratch own = scratch;
  if (gather != nullptr) own.act = gather->part();
  expert_gate_up(shape_, own, x, w13, count, launch, stream, gate_up);
  if (gather != nullptr) gather->gather(scratch.act, count * shape_.per_token, shape_.inter);
  expert_down(shape_, scratch, w2, count, partial, launch, stream);
  if (adapts && adapters.a2 != nullptr) adapt_down(shape_, scratch, adapters, count, partial, tile_rows, stream);
  combine_experts(shape_, scratch, gather == nullptr ? y : gather->part(), count, partial, stream);
  if (gather != nullptr) gather->gather(y, count, shape_.outputs());
}

}  // namespace refit::cuda
