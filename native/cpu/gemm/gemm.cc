#include "cpu/gemm/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/dtype.h"

namespace refit::cpu {

namespace {

constexpr int64_t kSlab = 512;  // rows of x that are converted at a time
// Bytes of weights in one claim if M is small. A panel is fetched while another is used.
constexpr int64_t kClaimBytes = 1 << 20;
constexpr int64_t kKBlock = 256;  // words of K in one panel: 16 KB of the first cache
constexpr int kPanels = 2;        // packed side by side
constexpr int64_t kAhead = 2048;  // bytes that a row of w is fetched ahead of its use
constexpr int kMaxWidth = 16;
constexpr int64_t kVectorSteps = 4;  // steps of the widest vector: packing writes whole vectors

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory that grows and never shrinks. It is freed when the thread ends.
class Scratch {
 public:
  uint32_t* words(int64_t n) {
    if (n > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<uint32_t*>(std::aligned_alloc(64, static_cast<size_t>(ceil_div(n, 16)) * 64)));
      if (!memory_) throw std::bad_alloc();
      size_ = n;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(uint32_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint32_t, Free> memory_;
  int64_t size_ = 0;
};

thread_local Scratch tls_rows;    // of the calling thread: x in words
thread_local Scratch tls_panels;  // of every thread

// One slab of rows, shared by the threads that work on it. Its rows are cut into tiles of nearly equal height, its
// columns into panels. A claim is the unit of work that a thread takes: some panels by some tiles.
struct Job {
  const GemmOps& ops;
  const float* x;
  int64_t ldx;
  const uint8_t* w;
  const uint8_t* bias;
  float* y;
  int64_t ldy;
  int64_t M, N, K;

  int64_t steps = 0;  // of all of K
  int64_t tiles = 0;
  bool direct = false;       // without panels
  int64_t claim_panels = 0;  // at most
  int64_t row_claims = 0;    // per column of claims
  int64_t claims = 0;        // if direct: panels
  int threads = 1;
  uint32_t* words = nullptr;  // x, tile after tile
  std::atomic<int64_t> next{0};

  int64_t row_bytes() const { return K * ops.weight_bytes; }
  int64_t tile_row(int64_t tile) const { return M * tile / tiles; }
  // The words of step `step` of the tile that begins at `row` and has `rows` rows.
  uint32_t* tile_words(int64_t row, int64_t rows, int64_t step) const {
    return words + (row * steps + step * rows) * 4;
  }
  int64_t first_tile(int64_t row_claim) const { return tiles * row_claim / row_claims; }
  const uint8_t* weights(int64_t n, int64_t k) const { return w + n * row_bytes() + k * ops.weight_bytes; }

  int64_t panel_words() const { return (kKBlock / 4 + kVectorSteps) * 4 * ops.width; }
  int64_t carry_words() const { return (ceil_div(M, row_claims) + ops.max_rows) * ops.carry; }  // of one panel
};

void plan(Job& job, int threads) {
  const GemmOps& ops = job.ops;
  const int64_t panels = ceil_div(job.N, ops.width);
  job.steps = ceil_div(job.K, 4 * ops.per_word);
  job.direct = job.M <= ops.max_direct;
  job.tiles = ceil_div(job.M, job.direct ? ops.direct_rows : ops.tile_rows);
  job.row_claims = 1;
  if (job.direct) {
    // Claims are large enough for long sequential reads of memory and small enough to give every thread some.
    const int64_t panel_bytes = std::max<int64_t>(1, ops.width * job.row_bytes());
    job.claim_panels = std::clamp<int64_t>(kClaimBytes / panel_bytes, 1, std::max<int64_t>(1, panels / (4 * threads)));
  } else {
    job.claim_panels = panels < 6 * threads ? 1 : kPanels;
    // There are too few columns for the threads, so the rows are cut too. The same panels are then packed several
    // times.
    const int64_t columns = ceil_div(panels, job.claim_panels);
    if (threads > 1)
      job.row_claims = std::clamp<int64_t>(3 * threads / columns, 1, std::max<int64_t>(1, job.tiles / 8));
  }
  job.claims = job.direct ? panels : ceil_div(panels, job.claim_panels) * job.row_claims;
  job.threads = threads;
}

// Claims [first, first + count) for the caller; with count 0 none is left. Of direct work, a thread takes many panels
// at once at first and few at the end, so the threads end at the same time.
struct Claim {
  int64_t first, count;
};
Claim take(Job& job) {
  int64_t first = job.next.load(std::memory_order_relaxed), count = 0;
  do {
    const int64_t left = job.claims - first;
    if (left <= 0) return {0, 0};
    count = job.direct ? std::clamp<int64_t>(left / (2 * job.threads), 1, job.claim_panels) : 1;
  } while (!job.next.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
  return {first, count};
}

void convert_tile(const Job& job, int64_t tile) {
  const int64_t row = job.tile_row(tile), rows = job.tile_row(tile + 1) - row;
  for (int64_t m = 0; m < rows; m++) {
    job.ops.convert(job.x + (row + m) * job.ldx, job.K, job.tile_words(row, rows, 0) + m * 4, rows * 4);
  }
}

// bias[n, n + width) as floats, zero past N.
void load_bias(const Job& job, int64_t n, float* out) {
  for (int64_t i = 0; i < job.ops.width; i++) {
    out[i] = 0.0f;
    if (n + i >= job.N) continue;
    if (job.ops.weight_bytes == 2) {
      uint16_t b;
      std::memcpy(&b, job.bias + (n + i) * 2, 2);
      out[i] = bf16_to_float(b);
    } else {
      std::memcpy(out + i, job.bias + (n + i) * 4, 4);
    }
  }
}

// The first tile waits for memory; the others find the rows of w in the cache. At the same time the rows of the next
// panel are fetched.
void multiply_direct(const Job& job, int64_t n, const float* bias) {
  for (int64_t t = 0; t < job.tiles; t++) {
    const int64_t row = job.tile_row(t), rows = job.tile_row(t + 1) - row;
    const int64_t ahead = t == 0 ? kAhead : job.ops.width * job.row_bytes();
    job.ops.direct(static_cast<int>(rows), job.tile_words(row, rows, 0), job.weights(n, 0), job.row_bytes(), job.K,
                   ahead, job.y + row * job.ldy + n, job.ldy, bias);
  }
}

// Columns [n, n_end), at most kPanels panels, by tiles [t, t_end).
void multiply_packed(const Job& job, int64_t n, int64_t n_end, int64_t t, int64_t t_end, const float (*bias)[kMaxWidth],
                     uint32_t* scratch) {
  const GemmOps& ops = job.ops;
  const int64_t k_block = kKBlock * ops.per_word;
  float* carry = reinterpret_cast<float*>(scratch + kPanels * job.panel_words());
  int64_t k = 0;
  do {  // once if K = 0: the result is the bias
    const int64_t k_here = std::min(k_block, job.K - k);
    const int64_t step = k / (4 * ops.per_word), steps = ceil_div(k_here, 4 * ops.per_word);
    for (int64_t c = n, p = 0; c < n_end; c += ops.width, p++) {
      ops.pack(job.weights(c, k), job.row_bytes(), static_cast<int>(std::min<int64_t>(ops.width, n_end - c)), k_here,
               kAhead, scratch + p * job.panel_words());
    }
    for (int64_t i = t; i < t_end; i++) {
      const int64_t row = job.tile_row(i), rows = job.tile_row(i + 1) - row;
      for (int64_t c = n, p = 0; c < n_end; c += ops.width, p++) {
        ops.tile(static_cast<int>(rows), job.tile_words(row, rows, step), scratch + p * job.panel_words(), steps,
                 k == 0, k + k_here == job.K, carry + p * job.carry_words() + (row - job.tile_row(t)) * ops.carry,
                 job.y + row * job.ldy + c, job.ldy, static_cast<int>(std::min<int64_t>(ops.width, n_end - c)),
                 job.bias != nullptr ? bias[p] : nullptr);
      }
    }
    k += k_block;
  } while (k < job.K);
}

// Takes claims until none is left.
void work(Job& job) {
  const GemmOps& ops = job.ops;
  uint32_t* scratch = tls_panels.words(kPanels * (job.panel_words() + job.carry_words()));
  alignas(64) float bias[kPanels][kMaxWidth];
  for (;;) {
    const Claim claim = take(job);
    if (claim.count == 0) return;
    const int64_t first_panel = job.direct ? claim.first : claim.first / job.row_claims * job.claim_panels;
    const int64_t begin = first_panel * ops.width;
    const int64_t end = std::min(job.N, begin + (job.direct ? claim.count : job.claim_panels) * ops.width);
    const int64_t row_claim = claim.first % job.row_claims;
    const int64_t t = job.first_tile(row_claim), t_end = job.first_tile(row_claim + 1);
    for (int64_t n = begin; n < end;) {
      // The last columns are less than a panel and go through a padded panel. The bits are the same.
      const bool direct = job.direct && n + ops.width <= end;
      const int64_t n_end = std::min(end, n + (job.direct ? 1 : kPanels) * ops.width);
      if (job.bias != nullptr) {
        for (int64_t c = n, p = 0; c < n_end; c += ops.width, p++) load_bias(job, c, bias[p]);
      }
      if (direct) {
        multiply_direct(job, n, job.bias != nullptr ? bias[0] : nullptr);
      } else {
        multiply_packed(job, n, n_end, t, t_end, bias, scratch);
      }
      n = n_end;
    }
  }
}

// Giving work to the pool costs about a microsecond, so one thread finishes less work than this sooner.
bool is_tiny(const Job& job) {
  const int64_t weights = job.N * job.K;
  return weights * job.ops.weight_bytes <= 32768 && job.M * weights <= 131072;
}

void multiply(Job& job, Pool& pool) {
  const int threads = is_tiny(job) ? 1 : pool.threads();
  plan(job, threads);
  job.words = tls_rows.words(job.M * job.steps * 4);
  if (threads == 1 || job.M * job.K <= 65536) {
    for (int64_t t = 0; t < job.tiles; t++) convert_tile(job, t);
  } else {
    pool.parallel_for(job.tiles, [&job](int64_t t, int) { convert_tile(job, t); });
  }
  if (threads == 1 || job.claims == 1) {
    work(job);
  } else {
    pool.parallel_for(std::min<int64_t>(threads, job.claims), [&job](int64_t, int) { work(job); });
  }
}

}  // namespace

void gemm(const GemmOps& ops, Pool& pool, const float* x, int64_t ldx, const void* w, const void* bias, float* y,
          int64_t ldy, int64_t M, int64_t N, int64_t K) {
  if (M <= 0 || N <= 0) return;
  for (int64_t m = 0; m < M; m += kSlab) {
    Job job{ops,
            x + m * ldx,
            ldx,
            static_cast<const uint8_t*>(w),
            static_cast<const uint8_t*>(bias),
            y + m * ldy,
            ldy,
            std::min(kSlab, M - m),
            N,
            std::max<int64_t>(0, K)};
    multiply(job, pool);
  }
}

}  // namespace refit::cpu
