#include "cuda/attention/attention_prefixes.h"

#include <algorithm>
#include <cstring>

#include "cuda/attention/attention.h"

namespace refit::cuda {
namespace {

struct Table {
  const int32_t* pages;
  int64_t count;  // pages that are full before the sequence's token
  int32_t sequence;
};

// Adds blocks of `Block` pages to the `count` that both tables have in common.
template <int64_t Block>
int64_t add_blocks(const Table& a, const Table& b, int64_t count, int64_t most) {
  while (count + Block <= most && std::memcmp(a.pages + count, b.pages + count, Block * sizeof(int32_t)) == 0) {
    count += Block;
  }
  return count;
}

// Number of pages from the first on that both tables have, at least `from`.
int64_t common_pages(const Table& a, const Table& b, int64_t from) {
  const int64_t most = std::min(a.count, b.count);
  from = add_blocks<8>(a, b, add_blocks<64>(a, b, from, most), most);
  while (from < most && a.pages[from] == b.pages[from]) ++from;
  return from;
}

// Sorts page tables by their pages.
class TableSort {
 public:
  explicit TableSort(const std::vector<Table>& tables)
      : tables_(tables), order_(tables.size()), common_(order_.size()) {
    for (size_t i = 0; i < order_.size(); ++i) order_[i].table = static_cast<int32_t>(i);
    ranges_.push_back({0, order_.size(), 0});
    while (!ranges_.empty()) {
      const Range range = ranges_.back();
      ranges_.pop_back();
      sort(range);
    }
  }
  const Table& table(size_t i) const { return tables_[order_[i].table]; }
  // Pages that tables i - 1 and i have in common; 0 at both ends.
  int64_t common(size_t i) const { return i == 0 || i == order_.size() ? 0 : common_[i]; }

 private:
  struct Place {
    int64_t key;
    int32_t table;
    bool operator<(const Place& other) const { return key != other.key ? key < other.key : table < other.table; }
  };
  // Tables order_[first, last) have the same first `depth` pages.
  struct Range {
    size_t first, last;
    int64_t depth;
  };

  // Calls each(first, last) for all places of equal keys.
  template <class Each>
  void runs(size_t first, size_t last, const Each& each) const {
    for (size_t run = first, end = first; run < last; run = end) {
      while (end < last && order_[end].key == order_[run].key) ++end;
      each(run, end);
    }
  }

  void sort(const Range& range) {
    for (size_t i = range.first; i < range.last; ++i) {
      const Table& table = tables_[order_[i].table];
      order_[i].key = table.count > range.depth ? table.pages[range.depth] : -1;
      if (i > range.first) common_[i] = range.depth;
    }
    std::sort(order_.begin() + range.first, order_.begin() + range.last);
    runs(range.first, range.last, [&](size_t first, size_t last) {
      if (last - first > 1 && order_[first].key >= 0) sort_by_one({first, last, range.depth + 1});
    });
  }

  // Tables that leave a table's pages at different depths are in order. A random table: each one is then in about
  // log2(tables) ranges, whatever the pages are.
  void sort_by_one(const Range& range) {
    constexpr int64_t kSame = int64_t{1} << 32;  // smaller keys are of smaller tables
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const size_t chosen = range.first + (random_ >> 33) % (range.last - range.first);
    const Table& one = tables_[order_[chosen].table];
    int64_t least = one.count, most = range.depth;
    for (size_t i = range.first; i < range.last; ++i) {
      const Table& table = tables_[order_[i].table];
      const int64_t common = i == chosen ? one.count : common_pages(one, table, range.depth);
      const bool less = common == table.count || (common < one.count && table.pages[common] < one.pages[common]);
      const bool same = common == table.count && common == one.count;
      order_[i].key = same ? kSame : less ? common : 2 * kSame - common;
      if (i == chosen) continue;
      least = std::min(least, common);
      most = std::max(most, common);
    }
    if (least == most) {
      ranges_.push_back({range.first, range.last, least});
      return;
    }
    std::sort(order_.begin() + range.first, order_.begin() + range.last);
    const auto depth_of = [&](size_t i) {
      const int64_t key = order_[i].key;
      return key == kSame ? one.count : key < kSame ? key : 2 * kSame - key;
    };
    for (size_t i = range.first + 1; i < range.last; ++i) common_[i] = std::min(depth_of(i - 1), depth_of(i));
    runs(range.first, range.last, [&](size_t first, size_t last) {
      if (last - first == 1 || order_[first].key == kSame) return;
      ranges_.push_back({first, last, depth_of(first)});
    });
  }

  const std::vector<Table>& tables_;
  std::vector<Place> order_;
  std::vector<int64_t> common_;
  std::vector<Range> ranges_;
  uint64_t random_ = 1;
};

// A list whose elements are indices into an array of the next ones. Lists are joined in constant time.
struct List {
  int32_t first = -1, last = -1;
  int64_t count = 0;

  void join(const List& other, std::vector<int32_t>& next) {
    if (other.count == 0) return;
    (count == 0 ? first : next[last]) = other.first;
    last = other.last;
    count += other.count;
  }
  template <class Each>
  void each(const std::vector<int32_t>& next, const Each& each) const {
    int32_t at = first;
    for (int64_t i = 0; i < count; ++i, at = next[at]) each(at);
  }
};

// A walk over the tree of page tables, each node once and after its children: the tables that share its pages.
class Finder {
 public:
  Finder(const std::vector<Table>& tables, int page_size, int64_t cost)
      : sorted_(tables), page_size_(page_size), cost_(cost), next_(tables.size()), next_prefix_(tables.size()) {}

  std::vector<SharedPrefix> find() {
    open_.push_back({});
    for (size_t i = 0; i < next_.size(); ++i) {
      const int64_t next = sorted_.common(i + 1);
      if (next > open_.back().depth) open_.emplace_back().depth = next;
      ++open_.back().tables;
      const auto at = static_cast<int32_t>(i);
      open_.back().loose.join({at, at, 1}, next_);
      while (open_.back().depth > next) {
        Node child = std::move(open_.back());
        open_.pop_back();
        finish(child);
        if (open_.back().depth < next) open_.emplace_back().depth = next;
        add(child, open_.back());
      }
    }
    finish(open_.back());
    std::vector<SharedPrefix> found;
    open_.back().found.each(next_prefix_, [&](int32_t p) {
      SharedPrefix& prefix = found.emplace_back(SharedPrefix{prefixes_[p].keys, {}});
      prefix.sequences.reserve(static_cast<size_t>(prefixes_[p].tables.count));
      prefixes_[p].tables.each(next_, [&](int32_t i) { prefix.sequences.push_back(sorted_.table(i).sequence); });
      std::sort(prefix.sequences.begin(), prefix.sequences.end());
    });
    return found;
  }

 private:
  // The tables of a subtree, as places in sorted_.
  struct Node {
    int64_t depth = 0;  // pages that all of them have
    int64_t tables = 0;
    int64_t saved = 0;  // reads of keys that `found` saves
    List found;         // prefixes
    List loose;         // tables in no prefix
    // Prefixes of children whose members this node may save more with, and what they save.
    List open;
    int64_t open_saved = 0, open_tables = 0;
  };
  struct Prefix {
    int64_t keys;
    List tables;
  };

  int64_t keys_of(const Node& node) const { return node.depth * page_size_ / kPrefixKeys * kPrefixKeys; }
  int64_t saved(int64_t count, int64_t keys) const { return count < 2 ? 0 : (count - 1) * keys - count * cost_; }

  void add(const Node& child, Node& node) {
    const int64_t grouped = child.tables - child.loose.count;
    node.tables += child.tables;
    node.loose.join(child.loose, next_);
    if (child.saved > grouped * (keys_of(node) - cost_)) {
      node.saved += child.saved;
      node.found.join(child.found, next_prefix_);
    } else {
      node.open_saved += child.saved;
      node.open_tables += grouped;
      node.open.join(child.found, next_prefix_);
    }
  }

  void finish(Node& node) {
    const int64_t keys = keys_of(node);
    if (saved(node.loose.count + node.open_tables, keys) <= node.open_saved) {
      node.found.join(node.open, next_prefix_);
      node.saved += node.open_saved;
    } else {
      node.open.each(next_prefix_, [&](int32_t p) { node.loose.join(prefixes_[p].tables, next_); });
    }
    const int64_t here = saved(node.loose.count, keys);
    if (here <= 0) return;
    const auto at = static_cast<int32_t>(prefixes_.size());
    prefixes_.push_back({keys, node.loose});
    node.found.join({at, at, 1}, next_prefix_);
    node.saved += here;
    node.loose = {};
  }

  const TableSort sorted_;
  const int page_size_;
  const int64_t cost_;
  std::vector<int32_t> next_, next_prefix_;
  std::vector<Prefix> prefixes_;
  std::vector<Node> open_;  // nodes from the root to the place of the walk
};

}  // namespace

std::vector<SharedPrefix> find_prefixes(const StepBatch& batch, int page_size, int64_t cost) {
  std::vector<Table> tables;
  for (int32_t s = 0; s < batch.sequences(); ++s) {
    const int64_t pages = batch.start_pos[s] / page_size;
    if (batch.seq_offsets[s + 1] - batch.seq_offsets[s] != 1 || pages == 0) continue;
    tables.push_back({batch.pages.data() + batch.page_offsets[s], pages, s});
  }
  if (tables.size() < 2) return {};
  return Finder(tables, page_size, cost).find();
}

}  // namespace refit::cuda
