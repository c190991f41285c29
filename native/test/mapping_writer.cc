// A program that rewrites a file through a shared mapping, as numpy.memmap does: no write() moves its time stamps.
//   mapping_writer held|anew FILE FIRST SECOND
// writes the bytes of FIRST and SECOND into FILE in turn, with a pause after each, until its standard input ends. All
// have one size. `held`: one mapping for all turns. `anew`: a mapping for each turn, so that nobody holds the file for
// writing in between. It prints a line when the first turn is done.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

constexpr size_t kPieces = 64;
constexpr int kPauseMs = 60;

std::vector<char> read_file(const char* path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

char* map_file(const char* path, size_t size) {
  const int fd = open(path, O_RDWR);
  if (fd < 0) fail(path);
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) fail("mmap");
  close(fd);
  return static_cast<char*>(at);
}

// True once standard input has ended.
bool ended(int wait_ms) {
  pollfd in{STDIN_FILENO, POLLIN, 0};
  return poll(&in, 1, wait_ms) > 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const bool held = std::strcmp(arguments[1], "held") == 0;
  const std::vector<char> contents[] = {read_file(arguments[3]), read_file(arguments[4])};
  const size_t size = contents[0].size();
  if (size == 0 || contents[1].size() != size) return 2;
  char* at = held ? map_file(arguments[2], size) : nullptr;
  for (size_t turn = 0;; turn++) {
    if (!held) at = map_file(arguments[2], size);
    // In pieces, so that a reader sees the file half written.
    for (size_t piece = 0; piece < kPieces; piece++) {
      const size_t from = size * piece / kPieces;
      std::memcpy(at + from, contents[turn % 2].data() + from, size * (piece + 1) / kPieces - from);
      usleep(200);
    }
    if (!held) munmap(at, size);
    if (turn == 0) {
      std::puts("begun");
      std::fflush(stdout);
    }
    if (ended(kPauseMs)) return 0;
  }
}
