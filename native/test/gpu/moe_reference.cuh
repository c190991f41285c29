// A mixture of experts computed on the host in double, and checks of the kernels' results. For moe_test.cc.
#pragma once
#include <algorithm>
#include <numeric>
#include <set>

#include "cuda/moe/moe_kernels.h"
#include "test/gpu/kernels/moe_reference_kernels.h"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {
namespace {

using cuda::ExpertKernel;
using cuda::Gemm;
using cuda::Moe;
using cuda::MoeScratch;
using cuda::MoeShape;
using cuda::RowTile;

constexpr size_t kWorkspace = 32 << 20;

float value(Element v) { return to_float(v); }

enum class Router {
  kRandom,
  kTies,   // some experts are equal
  kEqual,  // all experts are equal
  kOne,    // all tokens choose the last expert
  kEmpty,  // no token chooses the first expert
};

struct Case {
  MoeShape shape;
  int64_t tokens;
  Router router = Router::kRandom;
  bool nan = false;                        // in the middle token
  int64_t turn = 0;                        // number of tokens that the scratch is sized for; 0: all
  std::vector<ExpertKernel> kernels = {};  // to force, one after the other

  std::string text(ExpertKernel kernel, bool partial) const {
    char s[200];
    std::snprintf(s, sizeof s, "E=%d k=%d hidden=%lld inter=%lld norm=%d T=%lld router=%d nan=%d turn=%lld kernel=%d%s",
                  shape.experts, shape.per_token, static_cast<long long>(shape.hidden),
                  static_cast<long long>(shape.inter), shape.norm_topk_prob, static_cast<long long>(tokens),
                  static_cast<int>(router), nan, static_cast<long long>(turn), static_cast<int>(kernel),
                  partial ? " partial" : "");
    return s;
  }
};

// The choice and order of experts, computed on the host.
struct Routes {
  std::vector<int32_t> ids;                          // [T, k], ascending
  std::vector<int32_t> best;                         // [T, k], best first
  std::vector<float> weights;                        // [T, k]
  std::vector<int32_t> slots, tokens;                // [T, k], [P]
  std::vector<int32_t> first;                        // [E + 1]: first slot of an expert
  std::vector<RowTile> tiles(int tile_rows) const {  // the tallest first, then in order of experts
    const auto height = [&](int32_t e) {
      const int32_t rows = first[e + 1] - first[e], tiles = (rows + tile_rows - 1) / tile_rows;
      return rows == 0 ? 0 : std::min(tile_rows, ((rows + tiles - 1) / tiles + 7) / 8 * 8);
    };
    std::vector<int32_t> order(first.size() - 1);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return height(a) > height(b); });
    std::vector<RowTile> list;
    for (const int32_t e : order) {
      const int32_t each = height(e);
      for (int32_t at = first[e]; at < first[e + 1]; at += each) {
        list.push_back({e, at, std::min(each, first[e + 1] - at)});
      }
    }
    return list;
  }
};

// x and router are multiples of 1/4 and 1/64, so small that every order of summing is exact in fp32: the choice of
// experts must match exactly, ties included.
Routes route(const Case& c, const std::vector<float>& x, const std::vector<float>& router) {
  const MoeShape& s = c.shape;
  const int E = s.experts, k = s.per_token;
  Routes r;
  for (int64_t t = 0; t < c.tokens; t++) {
    std::vector<float> p(E);
    float most = -INFINITY, sum = 0;
    for (int e = 0; e < E; e++) {
      float logit = 0;
      for (int64_t h = 0; h < s.hidden; h++) logit += x[t * s.hidden + h] * router[e * s.hidden + h];
      p[e] = round_element(logit);
      most = std::fmax(most, p[e]);
    }
    const std::vector<float> logits = p;
    for (float& v : p) sum += v = std::exp(v - most);
    std::vector<int32_t> order(E);
    std::iota(order.begin(), order.end(), 0);
    if (!std::isnan(sum)) {
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    }
    order.resize(k);
    float total = 0;
    for (int32_t e : order) total += p[e] / sum;
    r.best.insert(r.best.end(), order.begin(), order.end());
    std::sort(order.begin(), order.end());
    for (int32_t e : order) {
      r.ids.push_back(e);
      r.weights.push_back(round_element(s.norm_topk_prob ? p[e] / sum / total : p[e] / sum));
    }
  }
  r.slots.resize(r.ids.size());
  for (int e = 0; e < E; e++) {
    r.first.push_back(static_cast<int32_t>(r.tokens.size()));
    for (size_t i = 0; i < r.ids.size(); i++) {
      if (r.ids[i] != e) continue;
      r.slots[i] = static_cast<int32_t>(r.tokens.size());
      r.tokens.push_back(static_cast<int32_t>(i) / k);
    }
  }
  r.first.push_back(static_cast<int32_t>(r.tokens.size()));
  return r;
}

std::vector<Element> elements_of(const std::vector<float>& values) {
  std::vector<Element> out(values.size());
  for (size_t i = 0; i < values.size(); i++) out[i] = to_element(values[i]);
  return out;
}

constexpr uint16_t kUnwritten = 0xfefe;

// The record of a layer among others: `stride` entries per token, of which the first k belong to this layer.
void check_record(const Case& c, const std::vector<uint16_t>& record, int64_t stride, const Routes& want,
                  const std::string& what) {
  const int64_t k = c.shape.per_token;
  for (int64_t i = 0; i < static_cast<int64_t>(record.size()); i++) {
    const int64_t token = i / stride, place = i % stride;
    const int expected = place < k ? want.best[token * k + place] : kUnwritten;
    if (!CHECKF(record[i] == expected, "%s: record of token %lld, place %lld of %lld: expected %d got %d", what.c_str(),
                static_cast<long long>(token), static_cast<long long>(place), static_cast<long long>(k), expected,
                record[i]))
      return;
  }
}

// Checks the choice and the order of experts that the kernels left in the scratch.
void check_routes(const Case& c, const MoeScratch& scratch, const Routes& want, int tile_rows,
                  const std::string& what) {
  const auto get = [](auto* from, size_t count) {
    std::vector<std::remove_reference_t<decltype(*from)>> values(count);
    check(cudaMemcpy(values.data(), from, count * sizeof(values[0]), cudaMemcpyDeviceToHost), "copy from the scratch");
    return values;
  };
  const size_t pairs = want.ids.size(), k = c.shape.per_token;
  const auto ids = get(scratch.ids, pairs), slots = get(scratch.slots, pairs), tokens = get(scratch.tokens, pairs);
  const auto weights = get(scratch.weights, pairs);
  for (size_t i = 0; i < pairs; i++) {
    CHECKF(ids[i] == want.ids[i], "%s: token %zu, expert %zu of it: expected %d got %d", what.c_str(), i / k, i % k,
           want.ids[i], ids[i]);
    const bool same = std::isnan(want.weights[i]) ? std::isnan(weights[i])
                                                  : std::fabs(weights[i] - want.weights[i]) <=
                                                        want.weights[i] * 2 * kElementError + kElementQuantum;
    CHECKF(same, "%s: token %zu, weight %zu of it: expected %g got %g", what.c_str(), i / k, i % k, want.weights[i],
           weights[i]);
    CHECKF(slots[i] == want.slots[i], "%s: pair %zu: expected slot %d got %d", what.c_str(), i, want.slots[i],
           slots[i]);
    CHECKF(tokens[i] == want.tokens[i], "%s: slot %zu: expected token %d got %d", what.c_str(), i, want.tokens[i],
           tokens[i]);
  }
  const auto list = want.tiles(tile_rows);
  CHECKF(static_cast<int64_t>(list.size()) <= cuda::max_row_tiles(pairs, c.shape.experts, tile_rows),
         "%s: %zu tiles are more than the bound %lld", what.c_str(), list.size(),
         static_cast<long long>(cuda::max_row_tiles(pairs, c.shape.experts, tile_rows)));
  const int count = get(scratch.tile_count, 1)[0];
  if (!CHECKF(count == static_cast<int>(list.size()), "%s: expected %zu tiles got %d", what.c_str(), list.size(),
              count))
    return;
  const auto tiles = get(scratch.tiles, list.size());
  for (size_t i = 0; i < list.size(); i++) {
    CHECKF(std::memcmp(&tiles[i], &list[i], sizeof(RowTile)) == 0,
           "%s: tile %zu: expected expert %d first %d rows %d got %d %d %d", what.c_str(), i, list[i].expert,
           list[i].first, list[i].rows, tiles[i].expert, tiles[i].first, tiles[i].rows);
  }
}

struct Problem {
  Problem(const Case& c, uint64_t seed)
      : x(c.tokens * c.shape.hidden),
        router(c.shape.experts * c.shape.hidden),
        w13(c.shape.experts * 2 * c.shape.inter * c.shape.hidden),
        w2(c.shape.experts * c.shape.hidden * c.shape.inter) {
    const MoeShape& s = c.shape;
    std::vector<float> hx(x.size()), hr(router.size());
    for (size_t i = 0; i < hx.size(); i++) hx[i] = std::round(noise(i, seed) * 4) / 4;
    const float wide = s.hidden < 512 ? 32 : 8;
    for (size_t i = 0; i < hr.size(); i++) {
      const int64_t e = i / s.hidden, h = i % s.hidden;
      const int64_t alike = c.router == Router::kTies    ? e % std::max(1, s.experts / 3)
                            : c.router == Router::kEqual ? 0
                                                         : e;
      hr[i] = std::round(noise(alike * s.hidden + h, seed + 1) * wide) / 64;
    }
    // The first column of x is one, so the first column of the router is a bonus.
    for (int64_t t = 0; t < c.tokens; t++) hx[t * s.hidden] = 1;
    if (c.router == Router::kOne) hr[(s.experts - 1) * s.hidden] = 64;
    if (c.router == Router::kEmpty) hr[0] = -64;
    if (c.nan) hx[c.tokens / 2 * s.hidden + s.hidden / 2] = NAN;
    routes = route(c, hx, hr);
    x.put(elements_of(hx));
    router.put(elements_of(hr));
    fill(w13.data(), s.experts * 2 * s.inter, s.hidden, s.hidden, 3.0f / std::sqrt(static_cast<float>(s.hidden)),
         seed + 2);
    fill(w2.data(), s.experts * s.hidden, s.inter, s.inter, 3.0f / std::sqrt(static_cast<float>(s.inter)), seed + 3);

    const auto pairs = static_cast<unsigned>(routes.ids.size());
    Buffer<int32_t> ids(pairs);
    Buffer<Element> act(pairs * s.inter);
    Buffer<double> sums(pairs * s.hidden);
    ids.put(routes.ids);
    launch_gate_up(pairs, x.data(), w13.data(), ids.data(), s.per_token, s.hidden, s.inter,
                   s.activation == Activation::kGeluTanh, act.data());
    launch_down(pairs, act.data(), w2.data(), ids.data(), s.hidden, s.inter, sums.data());
    out = sums.get();
    double squares = 0;
    for (double v : out) squares += std::isnan(v) ? 0 : v * v;
    rms = std::sqrt(squares / static_cast<double>(out.size()));
  }

  Buffer<Element> x, router, w13, w2;
  Routes routes;
  std::vector<double> out;  // [T, k, hidden]: for each expert of a token
  double rms;
};

// The expected y and its tolerance: a sum on the other side of a rounding boundary changes the result by one unit in
// the last place. Allowed are two for the terms, one for each of two elements of the activation, and one for the
// largest intermediate sum.
struct Expected {
  double y, allowed;
};

Expected expect(const Case& c, const Problem& problem, int64_t token, int64_t column, bool partial) {
  const MoeShape& s = c.shape;
  double size = 0, exact = 0, weights = 0;
  float rounded = 0, largest = 0;
  for (int j = 0; j < s.per_token; j++) {
    const int64_t pair = token * s.per_token + j;
    const float weight = problem.routes.weights[pair];
    const double out = problem.out[pair * s.hidden + column];
    rounded = round_element(rounded + round_element(round_element(static_cast<float>(out)) * weight));
    largest = std::max(largest, std::fabs(rounded));
    exact += out * weight;
    size += std::fabs(out * weight);
    weights += weight;
  }
  return {partial ? exact : rounded,
          (size + largest + problem.rms * weights) * 2 * kElementError + kElementQuantum + 1e-30};
}

// y may be the sum of several ranks' parts.
void check_sum(const Case& c, const Problem& problem, const std::vector<std::vector<Element>>& shares, bool partial,
               const std::string& what) {
  const int64_t hidden = c.shape.hidden;
  long wrong = 0, equal = 0;
  double worst = 0, worst_want = 0, worst_got = 0;
  int64_t worst_at = 0;
  for (int64_t i = 0; i < c.tokens * hidden; i++) {
    Expected want = expect(c, problem, i / hidden, i % hidden, partial);
    double got = 0;
    for (const auto& share : shares) {
      got += value(share[i]);
      if (partial) want.allowed += std::fabs(value(share[i])) * kElementError;
    }
    if (std::isnan(want.y)) {
      wrong += !std::isnan(got);
      if (!std::isnan(got)) worst_at = i, worst_want = want.y, worst_got = got;
      continue;
    }
    const double error = std::fabs(got - want.y) / want.allowed;
    equal += got == want.y;
    if (error <= worst) continue;
    if (!(error <= 1)) wrong++;
    worst = error;
    worst_at = i;
    worst_want = want.y;
    worst_got = got;
  }
  CHECKF(wrong == 0,
         "%s: at least %ld of %lld wrong; worst at token %lld column %lld: expected %.9g got %.9g, %.3g times the "
         "tolerance "
         "(%ld equal)",
         what.c_str(), wrong, static_cast<long long>(c.tokens * hidden), static_cast<long long>(worst_at / hidden),
         static_cast<long long>(worst_at % hidden), worst_want, worst_got, worst, equal);
  // The kernels round where the reference rounds: most elements are equal bit for bit.
  CHECKF(partial || c.nan || equal * 3 >= c.tokens * hidden, "%s: only %ld of %lld are equal", what.c_str(), equal,
         static_cast<long long>(c.tokens * hidden));
}

}  // namespace
}  // namespace refit::test
