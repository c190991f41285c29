#include "codec/pickle_tree.h"

namespace refit {

PickleTree to_tree(const PickleMachine& machine) {
  PickleTree tree{machine.root(), {}, machine.tuple_items(), machine.encoded()};
  std::vector<int32_t> starts;
  for (const auto& items : machine.lists()) {
    starts.push_back(static_cast<int32_t>(tree.values.size()));
    tree.values.insert(tree.values.end(), items.begin(), items.end());
  }
  // The first object that has each list of items. A set may have the items of a list.
  std::vector<int32_t> owners(starts.size(), -1);
  tree.objects.reserve(4 * machine.objects().size());
  for (size_t index = 0; index < machine.objects().size(); index++) {
    const PickleObject& object = machine.objects()[index];
    auto at = static_cast<int32_t>(object.at), size = static_cast<int32_t>(object.size), more = object.more;
    if (object.type == PickleType::kList || object.type == PickleType::kDict || object.type == PickleType::kSet) {
      int32_t& owner = owners[object.at];
      more = owner;
      if (owner == -1) owner = static_cast<int32_t>(index);
      at = starts[object.at];
      size = static_cast<int32_t>(machine.lists()[object.at].size());
    }
    tree.objects.insert(tree.objects.end(), {static_cast<int32_t>(object.type), at, size, more});
  }
  return tree;
}

}  // namespace refit
