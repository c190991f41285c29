#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_hopper.h"
#include "cuda/attention/attention_launch.h"
#include "cuda/attention/attention_merge.cuh"
#include "cuda/attention/attention_narrow.cuh"
#include "cuda/attention/attention_wide.cuh"
#include "cuda/device/current_gpu.h"
#include "cuda/device/early_launch.cuh"

namespace refit::cuda {
namespace {

template <int D>
void launch(AttentionArgs a, const AttentionInput& input, int pages, cudaStream_t stream) {
  static std::atomic<uint64_t> wide_done{0}, prefix_done{0}, narrow_done{0};
  const int wide = input.wide_items < 0 ? input.item_count : input.wide_items;
  const int narrow = input.wide_items < 0 ? input.item_count : input.item_count - wide;
  const auto blocks = [&a](int items) { return static_cast<unsigned>(items) * static_cast<unsigned>(a.kv_heads); };
  if (wide > 0 && input.wide != WideKernel::kMma) {
    attention_wide_hopper(a, wide, pages, input.wide == WideKernel::kHopperExact, stream);
  } else if (wide > 0) {
    // The rest of the 228 KiB is a cache for sums that wait for the end of their chunk.
    constexpr int kBytes = AttentionShape<D>::kStreamBytes, kCarveout = 72;
    constexpr auto kKernel = attention_wide_kernel<D, AttentionItem>;
    allow_shared(kKernel, kBytes, kCarveout, wide_done);
    kKernel<<<blocks(wide), kAttentionThreads, kBytes, stream>>>(a, a.items);
    check_launch("attention_wide");
  }
  if (input.prefix_count > 0) {
    constexpr int kBytes = kPrefixBytes<D>, kCarveout = 100;
    constexpr auto kKernel = attention_wide_kernel<D, AttentionPrefix>;
    allow_shared(kKernel, kBytes, kCarveout, prefix_done);
    launch_early_shared(kKernel, true, blocks(input.prefix_count), kAttentionThreads, kBytes, stream,
                        "attention_prefix", a, input.prefixes);
  }
  if (narrow > 0) {
    constexpr int kBytes = NarrowShape<D>::kBytes, kCarveout = 100;
    allow_shared(attention_narrow_kernel<D>, kBytes, kCarveout, narrow_done);
    a.items += input.item_count - narrow;
    launch_early_shared(attention_narrow_kernel<D>, true, blocks(narrow), kAttentionThreads, kBytes, stream,
                        "attention_narrow", a);
  }
}

void check_input(int64_t ldq, const AttentionInput& input, const KvLayer& kv, int heads, const Element* qkv,
                 const Element* out) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("attention: " + what); };
  if (kv.head_dim < 8 || kv.head_dim % 8 != 0 || kv.head_dim > 256) {
    fail("head_dim is " + std::to_string(kv.head_dim) + ", expected a multiple of 8 up to 256");
  }
  if (kv.kv_heads < 1 || heads % kv.kv_heads != 0 || heads / kv.kv_heads < 1 || heads / kv.kv_heads > kWideRows) {
    fail(std::to_string(heads) + " query heads for " + std::to_string(kv.kv_heads) +
         " KV heads, expected a multiple of up to " + std::to_string(kWideRows));
  }
  if (kv.page_size < 1 ||
      static_cast<int64_t>(kv.pages) * kv.kv_heads * kv.page_size > std::numeric_limits<int>::max()) {
    fail("the cache has " + std::to_string(kv.pages) + " pages of " + std::to_string(kv.page_size) + " tokens with " +
         std::to_string(kv.kv_heads) + " heads, expected at most 2^31 keys of one head in all");
  }
  if (ldq % 2 != 0 || reinterpret_cast<uintptr_t>(qkv) % 4 != 0 || reinterpret_cast<uintptr_t>(kv.k) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(kv.v) % 16 != 0) {
    fail("a buffer is not aligned");
  }
  if (input.wide != WideKernel::kMma &&
      ((kv.head_dim != 64 && kv.head_dim != 128) || ldq % kv.head_dim != 0 ||
       reinterpret_cast<uintptr_t>(qkv) % 16 != 0 || reinterpret_cast<uintptr_t>(out) % 16 != 0)) {
    fail("the Hopper kernel does not compute head_dim " + std::to_string(kv.head_dim) + " with rows of " +
         std::to_string(ldq) + " elements, or a buffer is not aligned");
  }
  const int most_items = std::max(input.item_count, input.prefix_count);
  if (static_cast<int64_t>(most_items) * kv.kv_heads > std::numeric_limits<int>::max()) {
    fail(std::to_string(most_items) + " items are too many for one launch");
  }
}

}  // namespace

WideKernel wide_kernel_here(int head_dim, bool exact) {
  if ((head_dim != 64 && head_dim != 128) || !has_wgmma()) return WideKernel::kMma;
  return exact ? WideKernel::kHopperExact : WideKernel::kHopper;
}

void attention(const Element* qkv, int64_t ldq, const AttentionInput& input, const KvLayer& kv, int heads, Element* out,
               cudaStream_t stream) {
  check_input(ldq, input, kv, heads, qkv, out);
  if (input.item_count == 0) return;
  const float scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kv.head_dim)));
  const AttentionArgs a{qkv,   ldq,         input.items,         input.pages,  kv.k,        kv.v,  input.parts,  out,
                        heads, kv.kv_heads, heads / kv.kv_heads, kv.page_size, kv.head_dim, scale, input.members};
  if (kv.head_dim <= 16) {
    launch<16>(a, input, kv.pages, stream);
  } else if (kv.head_dim <= 32) {
    launch<32>(a, input, kv.pages, stream);
  } else if (kv.head_dim <= 64) {
    launch<64>(a, input, kv.pages, stream);
  } else if (kv.head_dim <= 96) {
    launch<96>(a, input, kv.pages, stream);
  } else if (kv.head_dim <= 128) {
    launch<128>(a, input, kv.pages, stream);
  } else {
    launch<256>(a, input, kv.pages, stream);
  }
  if (input.merge_count > 0) {
    // Tokens of wide items are many, so few merges of them do not occupy a GPU.
    constexpr int kFillingBlocks = 528, kMostPieces = 16;
    const int pieces =
        input.wide_items == 0 ? 1 : std::clamp(kFillingBlocks / (input.merge_count * heads), 1, kMostPieces);
    // It does not begin early: its blocks would crowd on the multiprocessors that are free first.
    attention_merge_kernel<<<dim3(input.merge_count, heads, pieces), kAttentionThreads, 0, stream>>>(a, input.merges);
    check_launch("attention_merge");
  }
}

}  // namespace refit::cuda
