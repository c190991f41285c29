// Random numbers from a seed (SplitMix64), the same on every machine.
#pragma once
#include <cstdint>

#include "core/checksum.h"

namespace refit::test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return splitmix64_mix(state_ += kGolden); }
  // In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool chance(int64_t one_in) { return below(one_in) == 0; }

 private:
  uint64_t state_;
};

}  // namespace refit::test
