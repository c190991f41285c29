// The tables of a pickle in the form that src/wire/pickle/read.ts reads.
#pragma once
#include <cstdint>
#include <vector>

#include "codec/pickle_machine.h"

namespace refit {

// Rows of `PickleTree::objects` are four ints: the type, then
//   text          its first byte in the pickle, its length, 1 for ASCII
//   bytes, float  its first byte in the pickle, its length, unused; encoded bytes: the same in `encoded`
//   tuple         its first value, how many, unused
//   list, dict    the same; a dict has alternating keys and values
//   set           the same; the last int is the object that has the same items, or -1
//   call          its name, the object of its arguments (a tuple or a list), the dict of its state or -1
// A tuple contains only objects of lower rows; the others may contain any.
struct PickleTree {
  PickleValue root;
  std::vector<int32_t> objects;
  std::vector<PickleValue> values;
  std::vector<uint8_t> encoded;
};

PickleTree to_tree(const PickleMachine& machine);

}  // namespace refit
