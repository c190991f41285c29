// A thread pool without OpenMP. The caller works too, an atomic counter hands out the work, and idle threads spin
// briefly and then sleep on a futex. A pool runs one parallel_for at a time (callers on several threads take turns).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace refit {

class Pool {
 public:
  // `threads` includes the caller: with 1 no thread is created.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;
  // Calls fn(index, thread) for every index in [0, n), in any order, thread in [0, threads()). Returns when all are
  // done. The first exception is rethrown here after all threads have stopped.
  void parallel_for(int64_t n, const std::function<void(int64_t index, int thread)>& fn);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace refit
