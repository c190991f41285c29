// The tables of a pickle that was read, as src/wire/pickle/read.ts takes them.
#pragma once
#include <cstdint>
#include <vector>

#include "codec/pickle_machine.h"

namespace refit {

// Rows of `PickleTree::objects` are four ints: the type, then
//   text          its first byte in the pickle, its length, 1 for ASCII
//   bytes, float  its first byte in the pickle, its length, unused; encoded bytes: the same in `encoded`
//   tuple         its first value, how many, unused
//   list, dict    the same; a dict has keys and values in turn
//   set           the same; the last int is the object whose items it has in common, or -1
//   call          its name, the object of its arguments (a tuple or a list), the dict of its state or -1
// A tuple holds objects of lower rows alone; the others may hold any.
struct PickleTree {
  PickleValue root;
  std::vector<int32_t> objects;
  std::vector<PickleValue> values;
  std::vector<uint8_t> encoded;
};

PickleTree to_tree(const PickleMachine& machine);

}  // namespace refit
