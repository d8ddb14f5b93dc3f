// SPDX-License-Identifier: MIT
//
// Rotary positions (Su et al. 2021): each pair of features of a query or key is
// a complex number, and is multiplied by exp(i·l·θ) where it stands at position
// l; a score then depends on distances alone.
//
// Code differs in its pairs, in its θ, in the sign of the angle, in how much of
// a head it turns, and keeps its tables in any dtype. Where a trace has heads
// before and after, all of that can be read from them: the numbers c + i·s of a
// position are the same for all items and heads, so that two unknowns of a pair
// explain 2·B·H numbers, and they have one length everywhere: nothing but a
// turn does that by chance.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// ---- Pairs of features -----------------------------------------------------

// The first 2n features (…, 2n) as n pairs.
std::array<Tensor, 2> pairs_of(const Tensor& x, int64_t n, bool halves) {
  if (halves) return {x.slice(-1, 0, n), x.slice(-1, n, 2 * n)};
  return {x.slice(-1, 0, 2 * n, 2), x.slice(-1, 1, 2 * n, 2)};
}

// heads (B, H, L, D) by tables (L, n); features behind the first 2n stay.
Tensor turned(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
              bool halves) {
  const int64_t n = cosines.size(1);
  require(2 * n <= heads.size(3));
  const auto [a, b] = pairs_of(heads, n, halves);
  const Tensor x = a * cosines - b * sines, y = a * sines + b * cosines;
  const Tensor whole =
      halves ? at::cat({x, y}, -1) : at::stack({x, y}, -1).flatten(-2);
  return at::cat({whole, heads.slice(-1, 2 * n)}, -1);
}

// The partner of each feature (…, 2n): x·cos + partner·sin turns a pair.
Tensor partners(const Tensor& x, bool halves) {
  const auto [a, b] = pairs_of(x, x.size(-1) / 2, halves);
  return halves ? at::cat({-b, a}, -1) : at::stack({-b, a}, -1).flatten(-2);
}

// heads (B, H, L, D) by tables of each feature, (L, 2n).
Tensor turned_by_feature(const Tensor& heads, const Turn& turn) {
  const int64_t width = turn.cosines.size(1);
  require(width <= heads.size(3));
  const Tensor x = heads.slice(-1, 0, width);
  const Tensor y = x * turn.cosines + partners(x, turn.halves) * turn.sines;
  return at::cat({y, heads.slice(-1, width)}, -1);
}

// ---- Tables that are given, or usual ---------------------------------------

// Cosines and sines (L, n) of so many pairs of features.
std::array<Tensor, 2> tables(const ObservedCall& call, bool halves,
                             int64_t length, int64_t width) {
  if (!call.cosines.defined()) {
    require(width % 2 == 0);
    const Tensor index = at::arange(width / 2, at::kDouble);
    const Tensor speed =
        (index * (-2.0 * std::log(1e4) / static_cast<double>(width))).exp();
    const Tensor angle = at::arange(length, at::kDouble).unsqueeze(-1) * speed;
    return {angle.cos(), angle.sin()};
  }
  std::array<Tensor, 2> found = {call.cosines, call.sines};
  for (Tensor& table : found) {
    table = table.slice(0, 0, length);
    // Written for each feature, a pair has its angle twice.
    if (table.size(1) * 2 <= width) continue;
    require(table.size(1) % 2 == 0);
    table = halves ? table.slice(1, 0, table.size(1) / 2)
                   : table.slice(1, 0, table.size(1), 2);
  }
  return found;
}

// ---- Turns that a trace shows ----------------------------------------------

// Also of what is computed in float32 on its way.
constexpr double kSame = 2e-5;

// Heads (B, H, L, D) as plain numbers: most of a trace is ruled out by the
// first few, sooner than PyTorch is called once.
using Numbers = at::TensorAccessor<const double, 4>;
Numbers numbers_of(const Tensor& heads) {
  return heads.accessor<const double, 4>();
}

// Calls visit(b, h, l) for all vectors, until it returns false; whether it
// never does.
template <typename Visit>
bool all_vectors(const Tensor& heads, Visit visit) {
  for (int64_t b = 0; b < heads.size(0); ++b) {
    for (int64_t h = 0; h < heads.size(1); ++h) {
      for (int64_t l = 0; l < heads.size(2); ++l) {
        if (!visit(b, h, l)) return false;
      }
    }
  }
  return true;
}

// How many features, from the first on, are not left as they were.
int64_t changed_features(const Tensor& before, const Tensor& after) {
  const double least = 1e-6 * largest_finite(after);
  const Numbers x = numbers_of(before), y = numbers_of(after);
  for (int64_t width = before.size(3); width > 0; --width) {
    const bool is_left = all_vectors(before, [&](auto b, auto h, auto l) {
      return !(std::abs(y[b][h][l][width - 1] - x[b][h][l][width - 1]) > least);
    });
    if (!is_left) return width;
  }
  return 0;
}

// Most of a trace is ruled out by the lengths of whole vectors, which a turn
// keeps, but for one factor.
bool keeps_lengths(const Tensor& before, const Tensor& after, int64_t width) {
  const Numbers x = numbers_of(before), y = numbers_of(after);
  double first = 0, least = kInfinity, most = 0, sum = 0;
  const bool is_possible = all_vectors(before, [&](auto b, auto h, auto l) {
    double of_x = 0, of_y = 0;
    for (int64_t i = 0; i < width; ++i) {
      of_x += x[b][h][l][i] * x[b][h][l][i];
      of_y += y[b][h][l][i] * y[b][h][l][i];
    }
    const double ratio = std::sqrt(of_y) / std::sqrt(of_x);
    if (first == 0) first = ratio;
    least = std::min(least, ratio);
    most = std::max(most, ratio);
    sum += ratio;
    // Two that are both within 5 % of the mean.
    return std::abs(ratio - first) <= 0.11 * first;
  });
  const double middle =
      sum / static_cast<double>(before.numel() / before.size(3));
  return is_possible && most - middle <= 0.05 * middle &&
         middle - least <= 0.05 * middle;
}

// What is scaled before it is turned is scaled in its own place.
Tensor without_scale(const Tensor& table, double modulus, int64_t width) {
  for (const double power : {-0.5, -0.25}) {
    const double scale = std::pow(static_cast<double>(width), power);
    if (std::abs(modulus - scale) < 1e-3 * scale) return table / scale;
  }
  return table;
}

// The turn (L, n) of the first 2n features that leads from one (B, H, L, D),
// which keeps their lengths, to the other, if one does.
std::optional<Turn> turn_between(const Tensor& before, const Tensor& after,
                                 bool halves, int64_t width) {
  const int64_t n = width / 2;
  const auto [a, b] = pairs_of(before, n, halves);
  const auto [x, y] = pairs_of(after, n, halves);
  const auto sum = [](const Tensor& t) { return t.sum({0, 1}); };
  const Tensor square = sum(a * a + b * b);
  const Tensor cosines = sum(a * x + b * y) / square;
  const Tensor sines = sum(a * y - b * x) / square;
  // A turn keeps lengths; tables may be rounded to bfloat16. Not so x·cos or
  // x'·sin, of which a turn is the sum.
  const Tensor lengths = (cosines.square() + sines.square()).sqrt();
  const double modulus = lengths.mean().item<double>();
  if (!std::isfinite(modulus) ||
      largest_finite(lengths - modulus) > 0.02 * modulus ||
      largest_finite(sines - sines.slice(0, 0, 1)) <= 1e-4 * modulus ||
      largest_difference(turned(before, cosines, sines, halves), after) >
          kSame * largest_finite(after)) {
    return std::nullopt;
  }
  return Turn{halves, without_scale(cosines, modulus, before.size(3)),
              without_scale(sines, modulus, before.size(3))};
}

// The same of as many features as are changed, or, where the angles of the last
// pairs are 0, of all halves. orders: whether pairs lie in halves.
std::optional<Turn> turn_between(const Tensor& before, const Tensor& after,
                                 std::initializer_list<bool> orders) {
  const int64_t changed = changed_features(before, after);
  if (changed == 0) return std::nullopt;
  for (const int64_t width : {changed, before.size(3)}) {
    if (width % 2 != 0 || !keeps_lengths(before, after, width)) continue;
    for (const bool halves : orders) {
      if (width != changed && !halves) continue;
      if (auto turn = turn_between(before, after, halves, width)) return turn;
    }
    if (changed == before.size(3)) break;
  }
  return std::nullopt;
}

// Whether two unknowns explain the first feature at the last position, as they
// have to do with each: y = c·x + s·p of a feature x, its partner p and y, what
// became of it.
bool explains_feature(const Tensor& before, const Tensor& after, bool halves,
                      int64_t width) {
  const Numbers heads = numbers_of(before), turned = numbers_of(after);
  const int64_t last = before.size(2) - 1, partner = halves ? width / 2 : 1;
  double xx = 0, xp = 0, pp = 0, xy = 0, py = 0;
  const auto each = [&](auto visit) {
    for (int64_t b = 0; b < before.size(0); ++b) {
      for (int64_t h = 0; h < before.size(1); ++h) {
        visit(heads[b][h][last][0], -heads[b][h][last][partner],
              turned[b][h][last][0]);
      }
    }
  };
  each([&](double x, double p, double y) {
    xx += x * x, xp += x * p, pp += p * p, xy += x * y, py += p * y;
  });
  const double determinant = xx * pp - xp * xp;
  const double c = (xy * pp - py * xp) / determinant,
               s = (py * xx - xy * xp) / determinant;
  double most = 0;
  each([&](double x, double p, double y) {
    const double off = std::abs(c * x + s * p - y);
    most = off > most || std::isnan(off) ? off : most;
  });
  return most <= 2 * kSame * largest_finite(after);
}

// The same by tables of each feature, which differ within a pair: two unknowns
// again, of B·H numbers.
std::optional<Turn> mixed_turn_between(const Tensor& before,
                                       const Tensor& after, bool halves) {
  const int64_t width = changed_features(before, after);
  if (width < 4 || width % 2 != 0 || before.size(0) * before.size(1) < 4)
    return std::nullopt;
  if (!explains_feature(before, after, halves, width)) return std::nullopt;
  const Tensor x = before.slice(-1, 0, width), y = after.slice(-1, 0, width);
  const Tensor p = partners(x, halves);
  const auto sum = [](const Tensor& t) { return t.sum({0, 1}); };
  const Tensor xx = sum(x * x), xp = sum(x * p), pp = sum(p * p);
  const Tensor xy = sum(x * y), py = sum(p * y);
  const Tensor determinant = xx * pp - xp * xp;
  const Turn turn{halves, (xy * pp - py * xp) / determinant,
                  (py * xx - xy * xp) / determinant};
  const Tensor lengths = (turn.cosines.square() + turn.sines.square()).sqrt();
  const auto [a, b] = pairs_of(turn.cosines, width / 2, halves);
  const bool is_turn =
      lengths.isfinite().all().item<bool>() &&
      largest_finite(lengths - 1.0) <= 0.02 &&
      largest_finite(turn.sines - turn.sines.slice(0, 0, 1)) > 1e-4 &&
      largest_finite(a - b) > 1e-3 &&
      largest_difference(turned_by_feature(before, turn), after) <=
          kSame * largest_finite(after);
  return is_turn ? std::optional(turn) : std::nullopt;
}

// `tensor` as heads (B, count, L, D), in each order of dimensions that code
// has.
void append_as_heads(const Tensor& tensor, const Tensor& heads, int64_t count,
                     std::vector<Tensor>& found) {
  const int64_t width = heads.size(3);
  const std::array<int64_t, 3> sizes = {heads.size(0), count, heads.size(2)};
  const bool is_pairs =
      tensor.dim() > 2 && tensor.size(-1) == 2 && 2 * tensor.size(-2) == width;
  if (tensor.numel() != sizes[0] * sizes[1] * sizes[2] * width ||
      !(is_pairs || tensor.size(-1) == width ||
        tensor.size(-1) == width * count)) {
    return;
  }
  const Tensor x = tensor.to(at::kDouble);
  for (const std::array<int64_t, 3>& order :
       {std::array<int64_t, 3>{0, 1, 2}, {0, 2, 1}, {2, 0, 1}, {1, 0, 2}}) {
    const Tensor shaped =
        x.reshape({sizes[order[0]], sizes[order[1]], sizes[order[2]], width});
    std::array<int64_t, 4> back = {0, 0, 0, 3};
    for (int64_t i = 0; i < 3; ++i) back[order[i]] = i;
    found.push_back(shaped.permute(back));
  }
}

// What the trace has that may be heads like these, (B, H, L, D): also where it
// has them only as they meet the queries, (…, D, L), and once for each query
// head that they serve.
const std::vector<Tensor>& like_heads(const ObservedCall& call,
                                      const Tensor& heads) {
  const int64_t width = heads.size(3), count = heads.size(1);
  const auto [known, is_new] =
      call.like_heads.try_emplace({heads.size(0), count, heads.size(2), width});
  std::vector<Tensor>& found = known->second;
  if (!is_new) return found;
  for (const Tensor& tensor : call.trace) {
    const bool is_last = tensor.dim() < 3 || tensor.size(-2) != width ||
                         tensor.size(-1) == width;
    const Tensor x = is_last ? tensor : tensor.mT();
    append_as_heads(x, heads, count, found);
    const int64_t queries = call.sizes.heads;
    if (queries == count || queries % count != 0) continue;
    std::vector<Tensor> repeated;
    append_as_heads(x, heads, queries, repeated);
    for (const Tensor& one : repeated)
      found.push_back(one.slice(1, 0, queries, queries / count));
  }
  return found;
}

// Pairs whose first features are laid before all second ones, in their places.
Tensor with_pairs_together(const Tensor& heads) {
  return heads.unflatten(3, {2, -1}).mT().flatten(3);
}

std::optional<Turn> shown_mixed_turn(const ObservedCall& call,
                                     const Tensor& heads) {
  const Tensor before = heads.detach();
  if (before.size(2) < 2) return {};
  for (const Tensor& after : like_heads(call, heads)) {
    for (const bool halves : {true, false}) {
      const auto turn = mixed_turn_between(before, after, halves);
      if (turn) return turn;
    }
  }
  return {};
}

}  // namespace

bool is_turned_alike(const ObservedCall& call, const Tensor& heads) {
  const Tensor before = heads.detach();
  const auto is_alike = [&](const Tensor& after, int64_t width, bool halves) {
    const auto [a, b] = pairs_of(before, width / 2, halves);
    const auto [x, y] = pairs_of(after, width / 2, halves);
    // Of each head: its number may stand in the place of the position.
    const auto sum = [](const Tensor& t) { return t.sum({0, 2}, true); };
    const Tensor square = sum(a * a + b * b);
    const Tensor cosines = sum(a * x + b * y) / square;
    const Tensor sines = sum(a * y - b * x) / square;
    const double allowed = kSame * largest_finite(after);
    return largest_finite(sines) > 1e-3 &&
           largest_difference(a * cosines - b * sines, x) <= allowed &&
           largest_difference(b * cosines + a * sines, y) <= allowed;
  };
  return before.size(2) > 1 &&
         std::ranges::any_of(like_heads(call, heads), [&](const Tensor& after) {
           const int64_t changed = changed_features(before, after);
           // In halves, the last pairs may be left as they are.
           return changed > 0 &&
                  std::ranges::any_of(
                      std::array{changed, before.size(3)}, [&](int64_t width) {
                        return width % 2 == 0 &&
                               keeps_lengths(before, after, width) &&
                               (is_alike(after, width, true) ||
                                is_alike(after, width, false));
                      });
         });
}

namespace {

std::optional<Turn> look_for_turn(const ObservedCall& call, const Tensor& heads,
                                  bool by_head) {
  const auto in_place = [&](const Tensor& x) {
    return by_head ? x.transpose(1, 2) : x;
  };
  const Tensor before = in_place(heads.detach());
  if (before.size(2) < 2) return {};  // of one place, none is seen to differ
  const std::vector<Tensor>& found = like_heads(call, heads);
  for (const Tensor& after : found) {
    const auto turn = turn_between(before, in_place(after), {true, false});
    if (turn) return turn;
  }
  // The products of queries and keys are those of pairs in their places.
  if (heads.size(3) % 2 != 0) return {};
  for (const Tensor& after : found) {
    const bool is_another =
        changed_features(before, in_place(after)) == before.size(3) &&
        !keeps_lengths(before, in_place(after), before.size(3));
    if (is_another) continue;
    const Tensor pairs = with_pairs_together(after);
    const auto turn = turn_between(before, in_place(pairs), {false});
    if (turn) return turn;
  }
  return {};
}

}  // namespace

std::optional<Turn> shown_turn(const ObservedCall& call, const Tensor& heads,
                               bool by_head) {
  if (by_head) return look_for_turn(call, heads, by_head);
  const uint64_t known = fingerprint(heads);
  if (call.unturned.contains(known)) return {};
  auto turn = look_for_turn(call, heads, by_head);
  if (!turn) call.unturned.insert(known);
  return turn;
}

bool belong_together(const Turn& query, const Turn& key) {
  if (query.halves != key.halves ||
      query.cosines.size(1) != key.cosines.size(1)) {
    return false;
  }
  const int64_t queries = query.cosines.size(0), keys = key.cosines.size(0);
  for (const int64_t ahead : {int64_t{0}, keys - queries}) {
    const int64_t first = std::max<int64_t>(0, -ahead);
    const int64_t last = std::min(queries, keys - ahead);
    if (last - first < 2) continue;
    const auto of = [](const Tensor& table, int64_t from, int64_t to) {
      return table.slice(0, from, to);
    };
    const Tensor c = of(query.cosines, first, last);
    const Tensor s = of(query.sines, first, last);
    const Tensor d = of(key.cosines, first + ahead, last + ahead);
    const Tensor t = of(key.sines, first + ahead, last + ahead);
    // By the angle between a query and the key of its own position: it is the
    // same everywhere. Tables may be rounded to bfloat16.
    const Tensor real = c * d + s * t, imaginary = s * d - c * t;
    const double allowed = 0.03 * largest_finite(real);
    if (largest_finite(real - real.slice(0, 0, 1)) <= allowed &&
        largest_finite(imaginary - imaginary.slice(0, 0, 1)) <= allowed) {
      return true;
    }
  }
  return false;
}

Tensor rotated(const ObservedCall& call, const Recipe& recipe, int role,
               const Tensor& heads) {
  if (recipe.rotary == Rotary::kShown) {
    std::optional<Turn>& turn = call.turns[role];
    if (!turn) turn = shown_turn(call, heads);
    require(turn.has_value());
    return turned(heads, turn->cosines, turn->sines, turn->halves);
  }
  if (recipe.rotary == Rotary::kMixed) {
    require(role < 2);
    // Looked for in the heads of the first recipe, which no other fault
    // changes.
    auto& turn = call.mixed_turns[role];
    if (!turn) turn = shown_mixed_turn(call, heads);
    require(turn->has_value());
    return turned_by_feature(heads, **turn);
  }
  if (recipe.rotary == Rotary::kByHead) {
    require(role < 2);
    if (heads.size(1) == 1) return heads;  // the first turns by nothing
    auto& turn = call.head_turns[role];
    if (!turn) turn = shown_turn(call, heads, /*by_head=*/true);
    require(turn->has_value());
    const auto& [pairs, cosines, sines] = **turn;
    return turned(heads.transpose(1, 2), cosines, sines, pairs).transpose(1, 2);
  }
  const bool halves = recipe.rotary == Rotary::kHalves;
  const auto [cosines, sines] =
      tables(call, halves, heads.size(2), heads.size(3));
  return turned(heads, cosines, sines, halves);
}

}  // namespace multihead::diagnosis
