// Measures the machine's own limits, which the benchmarks compare with. Prints one JSON object. Modes:
//   memory read BYTES THREADS      best vectorised read of BYTES of memory by THREADS threads, GB/s
//   memory pread THREADS FILE...   plain pread of all files by THREADS threads into faulted-in memory, GB/s
//   memory turns THREADS FILE      the same for each line of the standard input, which names a file no longer than
//                                  FILE; a line {"ms"} for each
//   memory memcpy THREADS FILE...  memcpy from a mapping of each file that is made for the copy and unmapped after it
//   memory mapped THREADS FILE...  memcpy from mappings that exist, and are faulted in, before
// Built by the benchmark that needs it: g++ -O3 -march=native -std=c++20 -pthread.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint8_t* faulted(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::abort();
  madvise(p, bytes, MADV_HUGEPAGE);
  memset(p, 1, bytes);
  return static_cast<uint8_t*>(p);
}

template <typename F>
void on_threads(int threads, F f) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; t++) pool.emplace_back(f, t);
  for (auto& thread : pool) thread.join();
}

typedef uint64_t Vec __attribute__((vector_size(64)));

void read_mode(size_t bytes, int threads) {
  uint8_t* data = faulted(bytes);
  std::atomic<uint64_t> sink{0};
  double best = 1e9;
  std::vector<double> all;
  for (int pass = 0; pass < 9; pass++) {
    const size_t chunk = 4u << 20;
    std::atomic<size_t> next{0};
    const double start = now();
    on_threads(threads, [&](int) {
      Vec a{}, b{}, c{}, d{};
      for (size_t at; (at = next.fetch_add(chunk)) < bytes;) {
        const size_t end = std::min(at + chunk, bytes & ~size_t{255});
        for (size_t i = at; i + 256 <= end; i += 256) {
          const Vec* v = reinterpret_cast<const Vec*>(data + i);
          a ^= v[0], b ^= v[1], c ^= v[2], d ^= v[3];
        }
      }
      a ^= b ^ c ^ d;
      sink += a[0] ^ a[7];
    });
    const double seconds = now() - start;
    all.push_back(seconds);
    best = std::min(best, seconds);
  }
  std::sort(all.begin(), all.end());
  printf("{\"bestGBs\": %.2f, \"medianGBs\": %.2f, \"sink\": %d}\n", bytes / best / 1e9,
         bytes / all[all.size() / 2] / 1e9,
         static_cast<int>(sink & 1));
}

enum class From { kFile, kNewMapping, kMapping };

// All ways of getting files' bytes, cut into the same pieces.
void copy_mode(From way, int threads, const std::vector<std::string>& files) {
  struct Piece {
    size_t file, offset, bytes, to;
  };
  struct Opened {
    int fd;
    size_t bytes;
    uint8_t* mapping;
  };
  std::vector<Opened> opened;
  std::vector<Piece> pieces;
  const auto map = [&](int populate) {
    for (auto& file : opened) {
      void* p = mmap(nullptr, file.bytes, PROT_READ, MAP_SHARED | populate, file.fd, 0);
      if (p == MAP_FAILED) std::abort();
      file.mapping = static_cast<uint8_t*>(p);
    }
  };
  size_t total = 0;
  for (const auto& file : files) {
    const int fd = open(file.c_str(), O_RDONLY);
    struct stat st {};
    if (fd < 0 || fstat(fd, &st) != 0) std::abort();
    opened.push_back({fd, static_cast<size_t>(st.st_size), nullptr});
    for (size_t at = 0; at < static_cast<size_t>(st.st_size); at += 4u << 20) {
      const size_t bytes = std::min<size_t>(4u << 20, st.st_size - at);
      pieces.push_back({opened.size() - 1, at, bytes, total});
      total += bytes;
    }
  }
  uint8_t* into = faulted(total);
  if (way == From::kMapping) map(MAP_POPULATE);
  std::vector<double> all;
  for (int pass = 0; pass < 7; pass++) {
    std::atomic<size_t> next{0};
    const double start = now();
    if (way == From::kNewMapping) map(0);
    on_threads(threads, [&](int) {
      for (size_t i; (i = next.fetch_add(1)) < pieces.size();) {
        const Piece& p = pieces[i];
        const Opened& file = opened[p.file];
        if (way != From::kFile) {
          memcpy(into + p.to, file.mapping + p.offset, p.bytes);
          continue;
        }
        for (size_t done = 0; done < p.bytes;) {
          const ssize_t n = pread(file.fd, into + p.to + done, p.bytes - done, p.offset + done);
          if (n <= 0) std::abort();
          done += n;
        }
      }
    });
    if (way == From::kNewMapping) {
      for (const auto& file : opened) munmap(file.mapping, file.bytes);
    }
    all.push_back(now() - start);
  }
  std::sort(all.begin(), all.end());
  printf("{\"bytes\": %zu, \"bestGBs\": %.2f, \"medianGBs\": %.2f}\n", total, total / all[0] / 1e9,
         total / all[all.size() / 2] / 1e9);
}

// Reads whole files into memory that is faulted in, each when its path comes.
void turns_mode(int threads, const std::string& longest) {
  struct stat about {};
  if (stat(longest.c_str(), &about) != 0) std::abort();
  const auto capacity = static_cast<size_t>(about.st_size);
  uint8_t* into = faulted(capacity);
  printf("{\"ms\": []}\n");
  fflush(stdout);
  for (std::string path; std::getline(std::cin, path);) {
    const double start = now();
    const int fd = open(path.c_str(), O_RDONLY);
    struct stat st {};
    if (fd < 0 || fstat(fd, &st) != 0 || static_cast<size_t>(st.st_size) > capacity) std::abort();
    const auto bytes = static_cast<size_t>(st.st_size), chunk = size_t{4} << 20;
    std::atomic<size_t> next{0};
    on_threads(threads, [&](int) {
      for (size_t at; (at = next.fetch_add(chunk)) < bytes;) {
        for (const size_t end = std::min(at + chunk, bytes); at < end;) {
          const ssize_t n = pread(fd, into + at, end - at, static_cast<off_t>(at));
          if (n <= 0) std::abort();
          at += static_cast<size_t>(n);
        }
      }
    });
    printf("{\"ms\": [%.3f]}\n", (now() - start) * 1e3);
    fflush(stdout);
    close(fd);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "read" && argc == 4) {
    read_mode(strtoull(argv[2], nullptr, 10), atoi(argv[3]));
  } else if (mode == "turns" && argc == 4) {
    turns_mode(atoi(argv[2]), argv[3]);
  } else if ((mode == "pread" || mode == "memcpy" || mode == "mapped") && argc >= 4) {
    const From from = mode == "pread" ? From::kFile : mode == "memcpy" ? From::kNewMapping : From::kMapping;
    copy_mode(from, atoi(argv[2]), {argv + 3, argv + argc});
  } else {
    fprintf(stderr,
            "usage: memory read BYTES THREADS | turns THREADS FILE | memory pread|memcpy|mapped THREADS FILE...\n");
    return 2;
  }
}
