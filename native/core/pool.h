// A thread pool without OpenMP: the caller takes part, work is handed out by an atomic counter, idle threads spin
// briefly and then sleep on a futex. One parallel_for at a time per pool (callers on several threads take turns).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace refit {

class Pool {
 public:
  // threads counts the caller: 1 means no thread is made.
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
