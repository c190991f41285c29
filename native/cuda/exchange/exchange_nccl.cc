#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <thread>

#include "core/device.h"
#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"
#include "cuda/exchange/exchange.h"

namespace refit::cuda {
namespace {

// Elements of one 16-byte vector: the smallest unit of a sum.
constexpr int64_t kVector = 8;

constexpr NcclType kNcclElement = of_element(kNcclBfloat16, kNcclFloat16);

// Returns when the stream has passed all its work. NCCL's kernels wait for their peers on the GPU, so only NCCL knows
// when a peer will never come.
void await_stream(NcclComm& comm, cudaStream_t stream, const char* what, const NcclWait& wait) {
  const auto began = std::chrono::steady_clock::now();
  for (int turn = 1;; ++turn) {
    const cudaError_t code = cudaStreamQuery(stream);
    if (code == cudaSuccess) break;
    cudaGetLastError();  // a later launch would report this "not ready", too
    if (code != cudaErrorNotReady) throw CudaError(code, what);
    if (turn % 64 == 0) comm.check();
    if (wait.cancel != nullptr && wait.cancel->load(std::memory_order_relaxed))
      throw NcclError(kNcclInProgress, std::string(what) + ": given up");
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - began;
    if (time.count() > wait.seconds)
      throw NcclError(kNcclInProgress, std::string(what) + ": not done after " + std::to_string(time.count()) + " s");
    // Short steps end within the first turns; longer ones may sleep 20 us.
    if (turn < 256) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

class NcclExchange : public Exchange {
 public:
  NcclExchange(Rank& rank, const Layout& layout, const ForwardShape& shape, const RankBuffers& own, NcclComm& comm)
      : rank_(rank),
        comm_(comm),
        ranks_(layout.ranks),
        me_(rank.index),
        vocab_rows_(layout.vocab_rows),
        ld_(shape.logits_ld),
        room_(shape.exchange),
        part_(own.exchange[0]),
        received_(own.exchange[1]),
        logits_(own.logits) {}

  void begin_step(const uint64_t*) override {}
  // Captured collectives of several GPUs in one process may deadlock.
  bool in_graphs() const override { return false; }
  void launched(uint64_t) override {}
  // One buffer is enough: its bytes are sent before the stream writes to it again.
  Element* part(int) const override { return part_; }

  void sum(int, int layer, Element* out, int64_t count) override {
    if (count <= 0) return;
    rank_.begin_op("all_reduce by NCCL", layer);
    const int64_t vectors = (count + kVector - 1) / kVector;
    const bool fits = (ranks_ - 1) * vectors * kVector <= room_;
    guarded([&] {
      // With two ranks both ways move the same bytes.
      if (fits && (ranks_ == 2 || vectors * 16 <= kOneShotBytes)) {
        sum_whole(out, vectors);
      } else {
        sum_shares(out, vectors);
      }
    });
  }

  void gather(int, int layer, Element* out, int64_t rows, int64_t columns) override {
    rank_.begin_op("all_gather by NCCL", layer);
    const int64_t most = room_ / ((ranks_ - 1) * columns), ld = ranks_ * columns;
    guarded([&] {
      for (int64_t row = 0; row < rows; row += most) {
        const int64_t count = std::min(most, rows - row), vectors = count * columns / kVector;
        Element* const mine = part_ + row * columns;
        comm_.group([&] {
          for (int r = 0; r < ranks_; ++r) {
            if (r != me_) swap(r, mine, vectors, slot(r, vectors), vectors);
          }
        });
        for (int r = 0; r < ranks_; ++r)
          copy_rows(out + row * ld + r * columns, ld, r == me_ ? mine : slot(r, vectors), columns, columns, count);
      }
    });
  }

  float* logits() const override { return logits_; }
  void next_logits() override {}

  // Uses the exchange buffers, as many rows at a time as they hold.
  void gather_logits(int rows) override {
    rank_.begin_op("logits by NCCL");
    const int64_t block = vocab_rows_;  // floats of one rank in a row
    const int64_t most = room_ / 2 / ((ranks_ - 1) * block);
    auto* const packed = reinterpret_cast<float*>(received_);
    guarded([&] {
      for (int64_t row = 0; row < rows; row += most) {
        const int64_t count = std::min<int64_t>(most, rows - row);
        float* const from = logits_ + row * ld_;
        if (me_ != 0) copy_rows(packed, block, from + me_ * block, ld_, block, count);
        comm_.group([&] {
          if (me_ != 0) return comm_.send(packed, static_cast<size_t>(count * block), kNcclFloat32, 0, rank_.stream);
          for (int r = 1; r < ranks_; ++r)
            comm_.recv(packed + (r - 1) * count * block, static_cast<size_t>(count * block), kNcclFloat32, r,
                       rank_.stream);
        });
        for (int r = 1; me_ == 0 && r < ranks_; ++r)
          copy_rows(from + r * block, ld_, packed + (r - 1) * count * block, block, block, count);
      }
    });
  }

  void wait() override {
    rank_.doing("wait for the step");
    // No limit here: the watchdog decides how long a step may take.
    guarded([&] { await_stream(comm_, rank_.stream, "the step", {std::numeric_limits<double>::infinity()}); });
  }

 private:
  // Every rank receives all parts and sums them.
  void sum_whole(Element* out, int64_t vectors) {
    SumParts parts;
    comm_.group([&] {
      for (int r = 0; r < ranks_; ++r) {
        parts.buffers[r] = r == me_ ? part_ : slot(r, vectors);
        if (r != me_) swap(r, part_, vectors, slot(r, vectors), vectors);
      }
    });
    sum_parts(parts, ranks_, out, vectors * kVector, rank_.stream);
  }

  // Rank r sums vectors [r * share, (r + 1) * share) and sends the result to the others.
  void sum_shares(Element* out, int64_t vectors) {
    const int64_t share = (vectors + ranks_ - 1) / ranks_;
    const auto first = [&](int r) { return std::min(r * share, vectors); };
    const auto size = [&](int r) { return first(r + 1) - first(r); };
    SumParts parts;
    comm_.group([&] {
      for (int r = 0; r < ranks_; ++r) {
        parts.buffers[r] = r == me_ ? part_ + first(me_) * kVector : slot(r, share);
        if (r != me_) swap(r, part_ + first(r) * kVector, size(r), slot(r, share), size(me_));
      }
    });
    sum_parts(parts, ranks_, out + first(me_) * kVector, size(me_) * kVector, rank_.stream);
    comm_.group([&] {
      for (int r = 0; r < ranks_; ++r) {
        if (r != me_) swap(r, out + first(me_) * kVector, size(me_), out + first(r) * kVector, size(r));
      }
    });
  }

  // The memory that receives rank r's vectors.
  Element* slot(int r, int64_t vectors) const { return received_ + (r < me_ ? r : r - 1) * vectors * kVector; }

  void swap(int peer, const Element* mine, int64_t sent, Element* theirs, int64_t taken) {
    if (sent > 0) comm_.send(mine, static_cast<size_t>(sent * kVector), kNcclElement, peer, rank_.stream);
    if (taken > 0) comm_.recv(theirs, static_cast<size_t>(taken * kVector), kNcclElement, peer, rank_.stream);
  }

  // lds in elements.
  template <class T>
  void copy_rows(T* to, int64_t to_ld, const T* from, int64_t from_ld, int64_t columns, int64_t rows) {
    check(cudaMemcpy2DAsync(to, static_cast<size_t>(to_ld) * sizeof(T), from, static_cast<size_t>(from_ld) * sizeof(T),
                            static_cast<size_t>(columns) * sizeof(T), static_cast<size_t>(rows),
                            cudaMemcpyDeviceToDevice, rank_.stream),
          "copy gathered rows");
  }

  // After an error the communicator is unusable. The GPU's own error comes first, because NCCL only repeats it.
  template <class F>
  void guarded(F&& fn) {
    try {
      fn();
    } catch (const NcclError& error) {
      const cudaError_t code = cudaStreamQuery(rank_.stream);
      cudaGetLastError();
      if (code != cudaSuccess && code != cudaErrorNotReady) throw CudaError(code, error.what());
      throw DeviceLost(rank_.label() + " cannot reach the other ranks: " + error.what());
    }
  }

  Rank& rank_;
  NcclComm& comm_;
  const int ranks_, me_;
  const int64_t vocab_rows_, ld_, room_;
  Element *const part_, *const received_;
  float* const logits_;
};

// Each rank exchanges a few bytes with every other, so that NCCL makes all connections.
void connect(Rank& rank, NcclComm& comm, const NcclWait& wait) {
  constexpr size_t kBytes = 1024;
  const auto ranks = static_cast<size_t>(comm.ranks());
  Growing memory(Growing::Where::kGpu);
  memory.reserve(kBytes * 2 * ranks, "memory to try NCCL's connections");
  uint8_t* const bytes = memory.data();
  check(cudaMemsetAsync(bytes, 0, kBytes * 2 * ranks, rank.stream), "clear");
  try {
    comm.group([&] {
      for (size_t r = 0; r < ranks; ++r) {
        if (static_cast<int>(r) == comm.rank()) continue;
        comm.send(bytes + kBytes * r, kBytes, kNcclUint8, static_cast<int>(r), rank.stream);
        comm.recv(bytes + kBytes * (ranks + r), kBytes, kNcclUint8, static_cast<int>(r), rank.stream);
      }
    });
    await_stream(comm, rank.stream, "the first exchange through NCCL", wait);
  } catch (const NcclError&) {
    comm.abort();  // ends the kernel if it was launched, so that the memory can be freed
    throw;
  }
}

}  // namespace

std::unique_ptr<Exchange> nccl_exchange(Rank& rank, const Layout& layout, const ForwardShape& shape,
                                        const RankBuffers& own, NcclComm& comm) {
  return std::make_unique<NcclExchange>(rank, layout, shape, own, comm);
}

std::vector<std::unique_ptr<NcclComm>> join_ranks(std::vector<std::unique_ptr<Rank>>& ranks, const NcclApi& api,
                                                  double seconds) {
  const NcclUniqueId id = new_nccl_id(api);
  std::vector<std::unique_ptr<NcclComm>> comms(ranks.size());
  std::atomic<bool> cancel{false};
  std::mutex mutex;
  std::exception_ptr cause;
  try {
    on_all(ranks, [&](Rank& rank) {
      try {
        rank.doing("join NCCL's communicator");
        auto& comm = comms[rank.index];
        const NcclWait wait{seconds, &cancel};
        comm = std::make_unique<NcclComm>(api, id, static_cast<int>(ranks.size()), rank.index, wait);
        rank.doing("connect the ranks through NCCL");
        connect(rank, *comm, wait);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!cause) cause = std::current_exception();
        }
        cancel = true;  // otherwise the others would wait for this rank
        throw;
      }
    });
  } catch (...) {
    on_all(ranks, [&](Rank& rank) { comms[rank.index].reset(); });
    if (cause) std::rethrow_exception(cause);
    throw;
  }
  for (const auto& comm : comms) comm->set_wait({seconds, nullptr});
  return comms;
}

}  // namespace refit::cuda
