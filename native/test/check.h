// Checks for the native test programs: a failed check is printed with its place and counted, and the program continues.
// main ends with `return refit::test::finish("name");`.
#pragma once
#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace refit::test {

inline std::atomic<long> checks{0};
inline std::atomic<long> failures{0};

// Any thread may call it. Only the first failures are printed: one broken kernel fails thousands of elements.
inline bool report(bool ok, const char* file, int line, const char* what) {
  checks.fetch_add(1, std::memory_order_relaxed);
  if (ok) return true;
  if (failures.fetch_add(1) < 50) std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  return false;
}

#if defined(__GNUC__)
__attribute__((format(printf, 5, 6)))
#endif
inline bool
reportf(bool ok, const char* file, int line, const char* what, const char* format, ...) {
  checks.fetch_add(1, std::memory_order_relaxed);
  if (ok) return true;
  if (failures.fetch_add(1) < 50) {
    char text[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", file, line, what, text);
  }
  return false;
}

// Prints the count and returns main's exit status.
inline int finish(const char* name) {
  std::printf("%s: %ld checks, %ld failures\n", name, checks.load(), failures.load());
  return failures.load() == 0 && checks.load() > 0 ? 0 : 1;
}

}  // namespace refit::test

// CHECK(ok); CHECKF(ok, "n=%d", n) also prints values. Both return the condition's value.
#define CHECK(cond) ::refit::test::report(static_cast<bool>(cond), __FILE__, __LINE__, #cond)
#define CHECKF(cond, ...) ::refit::test::reportf(static_cast<bool>(cond), __FILE__, __LINE__, #cond, __VA_ARGS__)
// The expression must throw exactly this type or one derived from it.
#define CHECK_THROWS(expr, type)                                                \
  do {                                                                          \
    bool thrown_ = false;                                                       \
    try {                                                                       \
      expr;                                                                     \
    } catch (const type&) {                                                     \
      thrown_ = true;                                                           \
    } catch (...) {                                                             \
    }                                                                           \
    ::refit::test::report(thrown_, __FILE__, __LINE__, #expr " throws " #type); \
  } while (0)
