#include "cuda/attention/attention_prefixes.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "cuda/attention/attention.h"

namespace refit::cuda {
namespace {

struct Table {
  const int32_t* pages;
  int64_t count;  // pages that are full before the sequence's token
  int32_t sequence;
};

// Number of pages from the first on that both tables have, at least `from` and at most `most`.
int64_t common_pages(const Table& a, const Table& b, int64_t from, int64_t most) {
  constexpr int64_t kBlock = 64;
  most = std::min({most, a.count, b.count});
  while (from + kBlock <= most && std::memcmp(a.pages + from, b.pages + from, kBlock * sizeof(int32_t)) == 0) {
    from += kBlock;
  }
  while (from < most && a.pages[from] == b.pages[from]) ++from;
  return from;
}

// A walk over the tree of page tables, each node once: the tables that share its pages.
class Finder {
 public:
  Finder(std::vector<Table> tables, int page_size, int64_t cost)
      : page_size_(page_size), cost_(cost), tables_(std::move(tables)) {
    for (size_t i = 0; i < tables_.size(); ++i) order_.push_back({-1, static_cast<int32_t>(i)});
  }

  std::vector<SharedPrefix> find() {
    search(0, order_.size(), 0);
    return std::move(found_);
  }

 private:
  // A table and the page at which it is compared with others; -1: none.
  struct Next {
    int32_t page, table;
    bool operator<(const Next& other) const { return page != other.page ? page < other.page : table < other.table; }
  };

  // The reads of keys that a subtree's prefixes save, and its sequences that are in none.
  struct Result {
    int64_t saved = 0;
    std::vector<int32_t> loose;
  };

  // The tables order_[first, last) have the same first `depth` pages.
  Result search(size_t first, size_t last, int64_t depth) {
    for (size_t i = first; i < last; ++i) {
      const Table& table = tables_[order_[i].table];
      order_[i].page = table.count > depth ? table.pages[depth] : -1;
    }
    std::sort(order_.begin() + first, order_.begin() + last);
    const int64_t keys = depth * page_size_ / kPrefixKeys * kPrefixKeys;
    Result all;
    // Prefixes of children whose members this node may save more with, and what they save.
    std::vector<SharedPrefix> open;
    int64_t open_saved = 0;
    for (size_t run = first, end = first; run < last; run = end) {
      while (end < last && order_[end].page == order_[run].page) ++end;
      if (order_[run].page < 0 || end - run == 1) {
        for (size_t i = run; i < end; ++i) all.loose.push_back(tables_[order_[i].table].sequence);
        continue;
      }
      const Table& one = tables_[order_[run].table];
      int64_t common = one.count;
      for (size_t i = run + 1; i < end; ++i) common = common_pages(one, tables_[order_[i].table], depth + 1, common);
      const size_t before = found_.size();
      const auto members = static_cast<int64_t>(end - run);
      Result child = search(run, end, common);
      const int64_t grouped = members - static_cast<int64_t>(child.loose.size());
      all.loose.insert(all.loose.end(), child.loose.begin(), child.loose.end());
      if (child.saved > grouped * (keys - cost_)) {
        all.saved += child.saved;
      } else {
        open_saved += child.saved;
        std::move(found_.begin() + before, found_.end(), std::back_inserter(open));
        found_.resize(before);
      }
    }

    const size_t loose = all.loose.size();
    for (const SharedPrefix& p : open) all.loose.insert(all.loose.end(), p.sequences.begin(), p.sequences.end());
    if (saved(all.loose, keys) <= open_saved) {
      std::move(open.begin(), open.end(), std::back_inserter(found_));
      all.saved += open_saved;
      all.loose.resize(loose);
    }
    const int64_t here = saved(all.loose, keys);
    if (here > 0) {
      all.saved += here;
      std::sort(all.loose.begin(), all.loose.end());
      found_.push_back({keys, std::move(all.loose)});
      all.loose.clear();
    }
    return all;
  }

  int64_t saved(const std::vector<int32_t>& sequences, int64_t keys) const {
    const auto count = static_cast<int64_t>(sequences.size());
    return count < 2 ? 0 : (count - 1) * keys - count * cost_;
  }

  const int page_size_;
  const int64_t cost_;
  const std::vector<Table> tables_;
  std::vector<Next> order_;
  std::vector<SharedPrefix> found_;
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
  return Finder(std::move(tables), page_size, cost).find();
}

}  // namespace refit::cuda
