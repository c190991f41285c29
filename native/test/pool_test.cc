#include "core/pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "test/check.h"

using refit::Pool;

namespace {

void every_index_runs_exactly_once(int threads) {
  Pool pool(threads);
  CHECK(pool.threads() == threads);
  for (int64_t n : {0, 1, 2, 3, 7, 64, 1000, 20000}) {
    std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
    std::atomic<int> bad_thread{0};
    pool.parallel_for(n, [&](int64_t i, int thread) {
      if (thread < 0 || thread >= threads) bad_thread++;
      hits[static_cast<size_t>(i)]++;
    });
    int wrong = 0;
    for (auto& h : hits) wrong += h.load() != 1;
    CHECKF(wrong == 0 && bad_thread == 0, "threads=%d n=%ld wrong=%d", threads, static_cast<long>(n), wrong);
  }
  pool.parallel_for(-5, [&](int64_t, int) { CHECK(false); });
}

// Two tasks of one job never run under the same thread number at the same time (per-thread scratch relies on it).
void a_thread_number_is_exclusive(int threads) {
  Pool pool(threads);
  std::vector<std::atomic<int>> inside(static_cast<size_t>(threads));
  std::atomic<int> clashes{0};
  auto job = [&] {
    for (int r = 0; r < 200; r++) {
      pool.parallel_for(1 + r % 9, [&](int64_t, int t) {
        if (inside[static_cast<size_t>(t)]++ != 0) clashes++;
        for (volatile int spin = 0; spin < 50;) spin = spin + 1;
        inside[static_cast<size_t>(t)]--;
      });
    }
  };
  std::thread other(job);
  job();
  other.join();
  CHECKF(clashes == 0, "threads=%d clashes=%d", threads, clashes.load());
}

void results_are_visible_and_jobs_do_not_leak_into_each_other(int threads) {
  Pool pool(threads);
  std::vector<int64_t> out(257);
  for (int round = 0; round < 3000; round++) {
    const int64_t n = 1 + round % 257;
    // A new closure every round: a late thread that ran an old one would write into the value of an earlier round.
    auto value = std::make_unique<int64_t>(round);
    pool.parallel_for(n, [&out, v = value.get()](int64_t i, int) { out[static_cast<size_t>(i)] = *v; });
    *value = -1;
    value.reset();
    bool ok = true;
    for (int64_t i = 0; i < n; i++) ok &= out[static_cast<size_t>(i)] == round;
    CHECKF(ok, "threads=%d round=%d", threads, round);
    // Sometimes long enough that the other threads fall asleep.
    if (round % 500 == 499) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void the_first_exception_comes_out_after_all_have_stopped(int threads) {
  Pool pool(threads);
  for (int round = 0; round < 200; round++) {
    std::atomic<int> running{0}, ran{0};
    bool caught = false;
    try {
      pool.parallel_for(100, [&](int64_t i, int) {
        running++;
        ran++;
        struct Leave {
          std::atomic<int>& r;
          ~Leave() { r--; }
        } leave{running};
        if (i == round % 100) throw std::runtime_error("index " + std::to_string(i));
      });
    } catch (const std::runtime_error& e) {
      caught = std::string(e.what()) == "index " + std::to_string(round % 100);
    }
    CHECKF(caught && running == 0, "threads=%d round=%d running=%d", threads, round, running.load());
    CHECK(ran <= 100);
    // All tasks throw. One exception is rethrown, and the pool still works.
    CHECK_THROWS(pool.parallel_for(50, [](int64_t, int) { throw std::logic_error("all"); }), std::logic_error);
    std::atomic<int> after{0};
    pool.parallel_for(10, [&](int64_t, int) { after++; });
    CHECK(after == 10);
  }
  CHECK_THROWS(pool.parallel_for(1, [](int64_t, int) { throw std::logic_error("one"); }), std::logic_error);
}

void a_nested_call_runs_inline_under_its_own_thread_number(int threads) {
  Pool pool(threads);
  std::atomic<int> total{0}, moved{0};
  pool.parallel_for(16, [&](int64_t, int outer) {
    pool.parallel_for(5, [&](int64_t, int inner) {
      if (inner != outer) moved++;
      pool.parallel_for(2, [&](int64_t, int) { total++; });
    });
  });
  CHECK(total == 160);
  CHECK(moved == 0);
  // An exception of the inner call crosses the outer one; afterwards the thread is outside the pool again.
  CHECK_THROWS(
      pool.parallel_for(
          4, [&](int64_t, int) { pool.parallel_for(3, [](int64_t, int) { throw std::range_error("inner"); }); }),
      std::range_error);
  std::atomic<int> after{0};
  pool.parallel_for(100, [&](int64_t, int) { after++; });
  CHECK(after == 100);
  // A call of another pool from a task is an ordinary call.
  Pool second(2);
  std::atomic<int> crossed{0};
  pool.parallel_for(8, [&](int64_t, int) { second.parallel_for(4, [&](int64_t, int) { crossed++; }); });
  CHECK(crossed == 32);
}

void callers_on_several_threads_take_turns(int threads) {
  Pool pool(threads);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4);
  for (int c = 0; c < 4; c++) {
    callers.emplace_back([&, c] {
      for (int r = 0; r < 300; r++) {
        std::atomic<int64_t> sum{0};
        pool.parallel_for(20, [&](int64_t i, int) { sum += i; });
        sums[static_cast<size_t>(c)] += sum;
      }
    });
  }
  for (auto& t : callers) t.join();
  for (int64_t s : sums) CHECK(s == 300 * 190);
}

void pools_come_and_go() {
  for (int i = 0; i < 100; i++) {
    Pool pool(1 + i % 4);
    std::atomic<int> n{0};
    if (i % 3 != 0) pool.parallel_for(i, [&](int64_t, int) { n++; });
    CHECK(n == (i % 3 != 0 ? i : 0));
  }
  CHECK_THROWS(Pool(0), std::invalid_argument);
  CHECK_THROWS(Pool(-1), std::invalid_argument);
  CHECK_THROWS(Pool(1 << 20), std::invalid_argument);
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    every_index_runs_exactly_once(threads);
    a_thread_number_is_exclusive(threads);
    results_are_visible_and_jobs_do_not_leak_into_each_other(threads);
    the_first_exception_comes_out_after_all_have_stopped(threads);
    a_nested_call_runs_inline_under_its_own_thread_number(threads);
    callers_on_several_threads_take_turns(threads);
  }
  pools_come_and_go();
  return refit::test::finish("pool_test");
}
