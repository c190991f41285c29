// Steps' activities added up by kernel, and names of kernels that fit a table.
#pragma once
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench_gpu/cupti_trace.h"

namespace refit::bench {

inline void erase_all(std::string& text, const std::string& part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
}

// "void refit::cuda::(anonymous namespace)::stream_experts<refit::cuda::GateUp, 2>(...)" -> "stream_experts<GateUp,2>".
// Names without C++ mangling (cuBLAS) are only cut.
inline std::string short_name(const std::string& mangled) {
  constexpr size_t kMost = 60;
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = demangled == nullptr ? mangled : demangled;
  std::free(demangled);
  if (status == 0) {
    for (const char* part : {"(anonymous namespace)::", "refit::cuda::", "refit::", "__nv_"}) erase_all(name, part);
    // The name begins behind the return type and ends before the parameters, both outside of template arguments.
    size_t begin = 0, end = name.size();
    int depth = 0;
    for (size_t i = 0; i < name.size() && end == name.size(); ++i) {
      if (name[i] == '<') ++depth;
      if (name[i] == '>') --depth;
      if (depth == 0 && name[i] == ' ') begin = i + 1;
      if (depth == 0 && name[i] == '(') end = i;
    }
    name = name.substr(begin, end - begin);
    for (size_t at; (at = name.find(", ")) != std::string::npos;) name.erase(at + 1, 1);
  }
  return name.size() <= kMost ? name : name.substr(0, kMost - 3) + "...";
}

// Microseconds and launches of one step, the mean of all that were added.
class StepProfile {
 public:
  struct Row {
    double launches = 0, us = 0;
    double alone = 0;  // without the time in which something before it still ran
    bool is_kernel = false;
  };

  // The activities of one step, by start.
  void add(const std::vector<Activity>& step) {
    uint64_t first = UINT64_MAX, last = 0, reached = 0;
    double launches = 0;
    for (const Activity& one : step) {
      if (one.is_kernel) first = std::min(first, one.start), last = std::max(last, one.start), ++launches;
    }
    for (const Activity& one : step) {
      if (reached > 0 && one.start > reached && one.start > first && one.start <= last)
        gaps_ += us(one.start - reached);
      Row& row = rows_[one.name];
      row.is_kernel = one.is_kernel;
      row.launches += 1;
      row.us += us(one.end - one.start);
      row.alone += us(one.end - std::min(one.end, std::max(one.start, reached)));
      reached = std::max(reached, one.end);
    }
    if (steps_++ > 0 && launches != launches_) is_even_ = false;
    launches_ = launches;
  }

  // Slowest first; the names are still mangled.
  std::vector<std::pair<std::string, Row>> rows() const {
    std::vector<std::pair<std::string, Row>> out;
    for (const auto& [name, sum] : rows_) {
      out.push_back({name, {sum.launches / steps_, sum.us / steps_, sum.alone / steps_, sum.is_kernel}});
    }
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.second.us > b.second.us; });
    return out;
  }
  // The kernels together.
  Row kernels() const {
    Row sum;
    for (const auto& [name, row] : rows()) {
      if (row.is_kernel) sum.launches += row.launches, sum.us += row.us, sum.alone += row.alone;
    }
    return sum;
  }
  // When nothing ran, between the first kernel and the last one.
  double gaps() const { return gaps_ / steps_; }
  int steps() const { return steps_; }
  // Whether all steps had the same number of launches; if not, records of one were taken for another's.
  bool is_even() const { return is_even_; }

 private:
  static double us(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }

  std::map<std::string, Row> rows_;
  double gaps_ = 0, launches_ = 0;
  int steps_ = 0;
  bool is_even_ = true;
};

}  // namespace refit::bench
