#include "core/pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace refit {

namespace {

// Two products of one forward pass are a few microseconds apart. A thread that has spun this often will have no work
// for a while.
constexpr int kSpins = 2000;
constexpr int kMaxThreads = 1024;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The pool whose task this thread is running, if any, and the thread number that it runs under.
thread_local const void* tls_pool = nullptr;
thread_local int tls_thread = 0;

struct Inside {
  Inside(const void* pool, int thread) : pool_(tls_pool), thread_(tls_thread) {
    tls_pool = pool;
    tls_thread = thread;
  }
  ~Inside() {
    tls_pool = pool_;
    tls_thread = thread_;
  }
  const void* pool_;
  int thread_;
};

}  // namespace

struct Pool::State {
  using Fn = std::function<void(int64_t, int)>;

  explicit State(int threads) : threads(threads) {}
  ~State() {
    {
      std::lock_guard<std::mutex> lock(sleep);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& t : workers) t.join();
  }

  void start() {
    // The pool's threads take no signals: those belong to the threads of the host program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::exception_ptr failed;
    try {
      for (int t = 1; t < threads; t++) workers.emplace_back([this, t] { worker(t); });
    } catch (...) {
      failed = std::current_exception();  // the destructor ends those that did start
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed) std::rethrow_exception(failed);
  }

  void publish(const Fn& f, int64_t count) {
    fn = &f;
    n = count;
    error = nullptr;
    done.store(0, std::memory_order_relaxed);
    remaining.store(count);
    if (sleepers.load() > 0) {
      // A thread that has counted itself is waiting, or will read `remaining` under this lock.
      { std::lock_guard<std::mutex> lock(sleep); }
      wake.notify_all();
    }
  }

  const int threads;
  std::vector<std::thread> workers;
  std::mutex callers;  // held through a whole parallel_for

  // The job. A thread takes an index by lowering `remaining`. The job stays open until the thread adds the index to
  // `done`, so fn and n may be read after a successful take and at no other time. Threads that wake up late find
  // `remaining` at zero.
  alignas(64) std::atomic<int64_t> remaining{0};
  const Fn* fn = nullptr;
  int64_t n = 0;
  std::exception_ptr error;  // written by the first thread that fails, under `sleep`
  alignas(64) std::atomic<int64_t> done{0};

  alignas(64) std::mutex sleep;
  std::condition_variable wake;      // workers: a job or the end
  std::condition_variable finished;  // the caller: all done
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};

  bool take(int64_t& rem) {
    rem = remaining.load(std::memory_order_acquire);
    while (rem > 0) {
      if (remaining.compare_exchange_weak(rem, rem - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return true;
    }
    return false;
  }

  // Runs indices until none is left. Returns whether it ran any.
  bool work(int thread) {
    int64_t rem;
    if (!take(rem)) return false;
    const Fn& f = *fn;
    const int64_t total = n;
    int64_t ran = 0;
    try {
      Inside inside(this, thread);
      do {
        ran++;
        f(total - rem, thread);
      } while (take(rem));
    } catch (...) {
      std::lock_guard<std::mutex> lock(sleep);
      if (!error) error = std::current_exception();
      // The remaining indices are dropped and count as done.
      ran += remaining.exchange(0, std::memory_order_acq_rel);
    }
    // The job may end here, so only members that outlive it are used below. The order is sequentially consistent
    // because the caller stores caller_sleeps and then reads done.
    if (done.fetch_add(ran) + ran == total && caller_sleeps.load()) {
      std::lock_guard<std::mutex> lock(sleep);
      finished.notify_all();
    }
    return true;
  }

  void worker(int thread) {
    for (;;) {
      int spins = 0;
      while (spins < kSpins) {
        if (work(thread)) {
          spins = 0;
        } else {
          relax();
          spins++;
        }
      }
      std::unique_lock<std::mutex> lock(sleep);
      // The count changes before the predicate reads `remaining`. The caller stores `remaining` and then reads the
      // count.
      sleepers.fetch_add(1);
      wake.wait(lock, [this] { return stop.load() || remaining.load() > 0; });
      sleepers.fetch_sub(1);
      if (stop.load()) return;
    }
  }

  void wait_for_workers() {
    for (int i = 0; i < kSpins; i++) {
      if (done.load(std::memory_order_acquire) == n) return;
      relax();
    }
    std::unique_lock<std::mutex> lock(sleep);
    caller_sleeps.store(true);
    finished.wait(lock, [this] { return done.load() == n; });
    caller_sleeps.store(false);
  }
};

Pool::Pool(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("a pool needs 1 to " + std::to_string(kMaxThreads) + " threads, got " +
                                std::to_string(threads));
  }
  state_ = std::make_unique<State>(threads);
  state_->start();
}

Pool::~Pool() = default;

int Pool::threads() const { return state_->threads; }

void Pool::parallel_for(int64_t n, const std::function<void(int64_t, int)>& fn) {
  if (n <= 0) return;
  State& s = *state_;
  if (tls_pool == &s) {
    const int thread = tls_thread;
    for (int64_t i = 0; i < n; i++) fn(i, thread);
    return;
  }
  std::lock_guard<std::mutex> turn(s.callers);
  if (n == 1 || s.threads == 1) {
    Inside inside(&s, 0);
    for (int64_t i = 0; i < n; i++) fn(i, 0);
    return;
  }
  s.publish(fn, n);
  s.work(0);
  s.wait_for_workers();
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

}  // namespace refit
