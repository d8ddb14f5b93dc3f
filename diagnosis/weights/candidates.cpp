// SPDX-License-Identifier: MIT
#include "diagnosis/weights/candidates.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>

#include "multihead/text/shapes.h"

namespace multihead::diagnosis {
namespace {

using enum Role;
using enum Orientation;

using std::string_view;

// ---- Names -----------------------------------------------------------------

struct Word {
  Role role;
  std::vector<string_view> texts;
  bool is_weak = false;
};

// Without case and underscores, and without what decorates them: W_q, q_proj,
// linear_q, toqueries are all q or queries.
const Word kWords[] = {
    {kQuery, {"q", "qs", "query", "queries"}},
    {kKey, {"k", "ks", "key", "keys"}},
    {kValue, {"v", "vs", "val", "vals", "value", "values"}},
    {kOutput,
     {"o", "out", "output", "attentionoutput", "attnoutput", "outattention",
      "outattn", "cproj", "concat", "unifyheads", "combineheads", "unifyhead",
      "mergeheads"}},
    {kFused, {"qkv", "querykeyvalue", "cattn", "inproj"}},
    {kKeyValue, {"kv", "keyvalue"}},
    {kOutput, {"fc", "dense", "proj", "projection", "final", "linear"}, true},
};

// The empty one first: a name is tried as it is before it is taken apart.
constexpr string_view kPrefixes[] = {
    "",           "w",  "to",    "linear", "lin",       "proj",
    "projection", "fc", "dense", "conv",   "project",   "weight",
    "weights",    "l",  "att",   "attn",   "attention", "mha"};
constexpr string_view kSuffixes[] = {
    "",       "proj",    "projs", "projection", "projections", "linear",
    "lin",    "layer",   "dense", "linears",    "fc",          "w",
    "net",    "heads",   "head",  "matrix",     "transform",   "conv",
    "weight", "weights", "l"};

// Parts of a path that add nothing to the one before: query.linear.weight.
constexpr string_view kNeutral[] = {"linear", "dense", "proj",
                                    "fc",     "layer", "baselayer"};

struct Ending {
  string_view text;
  Says says;
};
constexpr Ending kLongEndings[] = {{"weights", Says::kWeight},
                                   {"weight", Says::kWeight},
                                   {"kernel", Says::kKernel},
                                   {"bias", Says::kBias}};
constexpr Ending kShortEndings[] = {{"w", Says::kWeight}, {"b", Says::kBias}};

constexpr string_view kBuffers[] = {
    "tril",      "mask",      "attnmask", "causalmask", "maskedbias",
    "invfreq",   "freqs",     "freqscis", "cos",        "sin",
    "coscached", "sincached", "cosine",   "sine",       "positionids"};

template <typename Range>
bool contains(const Range& range, string_view text) {
  return std::ranges::find(range, text) != std::end(range);
}

bool is_number(string_view text) {
  return std::ranges::all_of(text,
                             [](unsigned char c) { return std::isdigit(c); });
}

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts(1);
  for (const unsigned char c : name.substr(0, name.find(':'))) {
    if (c == '.' || c == '/' || c == '[' || c == ']') {
      if (!parts.back().empty()) parts.emplace_back();
    } else if (c != '_' && c != '-' && c != ' ') {
      parts.back() += static_cast<char>(std::tolower(c));
    }
  }
  if (parts.size() > 1 && parts.back().empty()) parts.pop_back();
  return parts;
}

// Removes text from either end; false if it is at neither.
bool strip(std::string& from, string_view text) {
  if (from.ends_with(text)) {
    from.resize(from.size() - text.size());
  } else if (from.starts_with(text)) {
    from.erase(0, text.size());
  } else {
    return false;
  }
  return true;
}

// "weight" as a part of its own or at an end of the last part; "w" as a part
// of its own or before a number.
Says take_ending(std::vector<std::string>& parts) {
  std::string& last = parts.back();
  Says says = Says::kNothing;
  for (const auto& [text, what] : kLongEndings) {
    if (strip(last, text)) {
      says = what;
      break;
    }
  }
  for (const auto& [text, what] : kShortEndings) {
    if (says == Says::kNothing && last.starts_with(text) &&
        is_number(string_view(last).substr(1)) &&
        (last.size() > 1 || parts.size() > 1)) {
      last.erase(0, 1);
      says = what;
    }
  }
  if (last.empty() && parts.size() > 1) parts.pop_back();
  return says;
}

const Word* find_word(string_view text) {
  for (const string_view prefix : kPrefixes) {
    if (!text.starts_with(prefix)) continue;
    const string_view rest = text.substr(prefix.size());
    for (const string_view suffix : kSuffixes) {
      if (!rest.ends_with(suffix)) continue;
      const string_view bare = rest.substr(0, rest.size() - suffix.size());
      for (const Word& word : kWords) {
        if (contains(word.texts, bare)) return &word;
      }
    }
  }
  return nullptr;
}

// Also "query3"; but "fc2" is another layer than "fc".
const Word* find_numbered_word(string_view text) {
  if (const Word* word = find_word(text)) return word;
  const size_t end = text.find_last_not_of("0123456789");
  if (end == string_view::npos) return nullptr;
  const Word* word = find_word(text.substr(0, end + 1));
  return word && word->role != kOutput ? word : nullptr;
}

void take_role(const Word* word, ParsedName& parsed) {
  if (!word) return;
  parsed.role = word->role;
  parsed.is_weak = word->is_weak;
}

// Reads "layers.0.attn.q_proj.weight", "W_q", "query/kernel:0",
// "in_proj_bias".
ParsedName parse_name(const std::string& name) {
  ParsedName parsed;
  std::vector<std::string> parts = parts_of(name);
  if (contains(kBuffers, parts.back())) {
    parsed.says = Says::kBuffer;
    return parsed;
  }
  parsed.says = take_ending(parts);
  for (const std::string& part : parts) parsed.stem += part + ".";
  while (parts.size() > 1 && is_number(parts.back())) parts.pop_back();
  const string_view last = parts.back();
  const Word* word = find_numbered_word(last);
  if (parts.size() > 1 && contains(kNeutral, last)) {
    const Word* before = find_numbered_word(parts[parts.size() - 2]);
    if (before && !before->is_weak) word = before;
  }
  take_role(word, parsed);
  if (word || parsed.says != Says::kNothing) return parsed;
  // "b_q", "out_b".
  std::string rest(last);
  if (strip(rest, "b") && (word = find_numbered_word(rest))) {
    take_role(word, parsed);
    parsed.says = Says::kBias;
  }
  return parsed;
}

// The name with "*" for every number: one for all heads of a list.
std::string list_name(const std::string& name) {
  std::string list;
  for (const unsigned char c : name) {
    if (!std::isdigit(c)) {
      list += static_cast<char>(c);
    } else if (!list.ends_with('*')) {
      list += '*';
    }
  }
  return list;
}

// Whether that list is one of layers, by its name.
bool is_list_of_layers(const std::string& list_name) {
  constexpr string_view kLayers[] = {"layer.*",  "layers.*", "layer_*",
                                     "blocks.*", "block.*",  "block_*"};
  return std::ranges::any_of(kLayers, [&](string_view layers) {
    return list_name.find(layers) != std::string::npos;
  });
}

// Sorts "head.10" behind "head.9".
bool comes_before(const std::string& a, const std::string& b) {
  // Numbers of one width compare as text.
  const auto key = [](const std::string& name) {
    constexpr size_t kWidth = 8;
    std::string text, number;
    for (const unsigned char c : name + '\0') {
      if (std::isdigit(c)) {
        number += static_cast<char>(c);
        continue;
      }
      if (!number.empty()) {
        text.append(kWidth - std::min(kWidth, number.size()), '0') += number;
        number.clear();
      }
      text += static_cast<char>(c);
    }
    return text;
  };
  return key(a) < key(b);
}

// ---- Shapes ----------------------------------------------------------------

// Axes: h heads, d head_dim, e width, H heads and head_dim as one. Where
// several fit, the first (in, out) is taken, but for matrices, whose
// orientation stays open.
constexpr string_view kLayouts[] = {"He", "eH", "hde", "hed", "ehd"};

bool fits(const at::Tensor& weight, string_view axes, const Extents& x) {
  if (weight.dim() != static_cast<int64_t>(axes.size())) return false;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const int64_t size = axes[axis] == 'h'   ? x.heads
                         : axes[axis] == 'd' ? x.head_dim
                         : axes[axis] == 'e' ? x.width
                                             : x.heads * x.head_dim;
    if (weight.size(static_cast<int64_t>(axis)) != size) return false;
  }
  return true;
}

Orientation orientation_of(string_view axes, bool is_output) {
  const bool width_first = axes.find('e') < axes.find_first_of("dH");
  return width_first == is_output ? kOutIn : kInOut;
}

at::Tensor out_in(const at::Tensor& weight, string_view axes,
                  const Extents& x) {
  std::vector<int64_t> order;
  for (const char axis : {'h', 'd', 'H', 'e'}) {
    const size_t at = axes.find(axis);
    if (at != axes.npos) order.push_back(static_cast<int64_t>(at));
  }
  const at::Tensor heads_first =
      weight.permute(order).reshape({x.heads * x.head_dim, x.width});
  return x.is_output ? heads_first.t() : heads_first;
}

}  // namespace

std::optional<OrientedMatrix> orient(const at::Tensor& weight,
                                     const Extents& extents, const Hint& hint) {
  std::vector<string_view> readings;
  for (const string_view axes : kLayouts) {
    if (fits(weight, axes, extents)) readings.push_back(axes);
  }
  if (hint.orientation != kUnknown) {
    auto agreeing = readings;
    std::erase_if(agreeing, [&](string_view axes) {
      return orientation_of(axes, extents.is_output) != hint.orientation;
    });
    if (hint.is_certain || !agreeing.empty()) readings = agreeing;
  }
  if (readings.empty()) return std::nullopt;
  if (readings.size() > 1 && weight.dim() == 2) {
    return OrientedMatrix{weight, kUnknown};
  }
  // Of axes for heads, code makes parameters of its own: input @ W.
  std::ranges::stable_partition(readings, [&](string_view axes) {
    return orientation_of(axes, extents.is_output) == kInOut;
  });
  return OrientedMatrix{out_in(weight, readings[0], extents),
                        orientation_of(readings[0], extents.is_output)};
}

namespace {

// (parts · heads · features, ...) whose axes lie otherwise, with a letter each.
std::vector<at::Tensor> cut_by_letters(const at::Tensor& fused, int64_t parts,
                                       int64_t heads, string_view letters) {
  const int64_t features = fused.size(0) / (parts * heads);
  std::vector<int64_t> sizes;
  for (const char letter : letters) {
    sizes.push_back(letter == 'p' ? parts : letter == 'h' ? heads : features);
  }
  std::vector<int64_t> order;
  for (const char letter : {'p', 'h', 'f'}) {
    order.push_back(static_cast<int64_t>(letters.find(letter)));
  }
  at::Tensor cut = fused.unflatten(0, sizes);
  for (int64_t d = 3; d < cut.dim(); ++d) order.push_back(d);
  return cut.permute(order).flatten(1, 2).unbind(0);
}

string_view letters_of(FusedOrder order) {
  return order == FusedOrder::kHeadFeaturePart   ? "hfp"
         : order == FusedOrder::kFeaturePartHead ? "fph"
         : order == FusedOrder::kFeatureHeadPart ? "fhp"
         : order == FusedOrder::kPartFeatureHead ? "pfh"
                                                 : "";
}

}  // namespace

std::vector<at::Tensor> cut(const at::Tensor& fused, int64_t queries_per_group,
                            int64_t groups, FusedOrder order,
                            string_view parts) {
  if (const string_view letters = letters_of(order); !letters.empty()) {
    if (queries_per_group > 1) return {};
    return cut_by_letters(fused, queries_per_group + 2, groups, letters);
  }
  std::vector<int64_t> heads;
  for (const char letter : parts) {
    if (letter != 'q') heads.push_back(1);
    if (letter == 'q' && queries_per_group > 0)
      heads.push_back(queries_per_group);
  }
  const int64_t heads_per_group = queries_per_group + 2;
  const bool by_head = order == FusedOrder::kHeadByHead;
  if (!by_head) {
    for (int64_t& count : heads) count *= groups;
  }
  std::vector<int64_t> shape = fused.sizes().vec();
  shape[0] = -1;
  std::vector<int64_t> cutting = shape;
  const int64_t head_dim = fused.size(0) / (heads_per_group * groups);
  const int64_t outer = by_head ? groups : 1;
  cutting[0] = head_dim;
  cutting.insert(cutting.begin(), {outer, heads_per_group * groups / outer});
  std::vector<at::Tensor> found =
      fused.reshape(cutting).split_with_sizes(heads, 1);
  for (at::Tensor& tensor : found) tensor = tensor.reshape(shape);
  return found;
}

// ---- Candidates ------------------------------------------------------------

namespace {

// Without a name the width of a head is taken to be the usual one.
bool fits_by_place(Role role, const Candidate& candidate,
                   const LayerSizes& sizes) {
  const Extents extents{heads_of(role, sizes),
                        sizes.embed_dim / sizes.num_heads, sizes.embed_dim,
                        role == kOutput};
  return candidate.is_matrix() && candidate.tensor.dim() == 2 &&
         orient(candidate.tensor, extents, {candidate.declared, true});
}

// "w1" and "w2", "a" and "b": other names come in no order.
bool names_are_in_order(const std::vector<Candidate*>& candidates) {
  const auto list = [](const Candidate* candidate) {
    const std::string& name = candidate->names[0];
    return name.size() == 1 ? "" : list_name(name);
  };
  return std::ranges::all_of(candidates, [&](const Candidate* candidate) {
    return list(candidate) == list(candidates[0]);
  });
}

// All heads in one tensor; the members as they are if that is not what they
// are.
Candidates stack(const Candidates& members, int64_t heads) {
  const bool alike = std::ranges::all_of(members, [&](const Candidate& member) {
    return member.tensor.sizes() == members[0].tensor.sizes();
  });
  if (heads == 1 || static_cast<int64_t>(members.size()) != heads || !alike ||
      is_list_of_layers(list_name(members[0].names[0]))) {
    return members;
  }
  Candidate whole = members[0];
  whole.names.clear();
  std::vector<at::Tensor> tensors;
  for (const Candidate& member : members) {
    whole.names.push_back(member.names[0]);
    tensors.push_back(member.tensor);
  }
  whole.tensor = at::stack(tensors);
  return {whole};
}

// (3, E, E), (3, H, E, D), (E, 3, H, D): an axis holds the parts.
Candidates parts_of(const Candidate& whole) {
  const bool is_pair = whole.parsed.role == kKeyValue;
  const std::vector<Role> roles =
      is_pair ? std::vector{kKey, kValue} : std::vector{kQuery, kKey, kValue};
  const auto count = static_cast<int64_t>(roles.size());
  const at::Tensor& tensor = whole.tensor;
  const int64_t rank = tensor.dim() + (whole.is_bias ? 1 : 0);
  const int64_t axis = rank == 4 && tensor.size(0) != count ? 1 : 0;
  const bool fused = is_pair || whole.parsed.role == kFused;
  if (!fused || rank < 3 || tensor.size(axis) != count) return {whole};
  Candidates parts(roles.size(), whole);
  for (int64_t i = 0; i < count; ++i) {
    parts[i].names[0] += c10::str("[", i, "]");
    parts[i].tensor = tensor.select(axis, i);
    parts[i].parsed.role = roles[i];
  }
  return parts;
}

}  // namespace

const char* role_text(Role role) {
  constexpr const char* kTexts[] = {"",
                                    "query",
                                    "key",
                                    "value",
                                    "output",
                                    "query, key and value",
                                    "key and value"};
  return kTexts[static_cast<size_t>(role)];
}

std::string Candidate::name() const {
  return names.size() == 1 ? names[0] : list_name(names[0]);
}

Candidates candidates_of(
    const std::map<std::string, at::Tensor>& weights,
    const std::map<std::string, Orientation>& orientations) {
  Candidates candidates;
  for (const auto& [name, tensor] : weights) {
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    Candidate candidate{{name}, tensor, parse_name(name)};
    const auto [role, is_weak, says, stem] = candidate.parsed;
    // GPT-2 calls its causal mask (1, 1, L, L) bias.
    const bool is_mask = says == Says::kBias && tensor.dim() > 3;
    if (says == Says::kBuffer || is_mask) continue;
    candidate.is_bias = tensor.dim() == 1
                            ? says != Says::kWeight
                            : says == Says::kBias && role != kNone;
    // Convolutions of width 1: (out, in, 1).
    at::Tensor& kept = candidate.tensor;
    while (candidate.is_matrix() && kept.dim() > 2 && kept.size(-1) == 1) {
      kept = kept.squeeze(-1);
    }
    // Of each head, broadcast over the batch: (H, 1, E, D) or (1, H, E, D).
    for (const int64_t dim : {1, 0}) {
      const bool broadcasts = kept.dim() == 4 && kept.size(dim) == 1;
      if (candidate.is_matrix() && broadcasts) kept = kept.squeeze(dim);
    }
    const auto known = orientations.find(name);
    if (known != orientations.end()) candidate.declared = known->second;
    std::ranges::move(parts_of(candidate), std::back_inserter(candidates));
  }
  std::ranges::sort(candidates, [](const Candidate& a, const Candidate& b) {
    return comes_before(a.names[0], b.names[0]);
  });
  return candidates;
}

void assign_roles_by_place(Candidates& candidates, const LayerSizes& sizes) {
  Candidates outputs = candidates;
  std::erase_if(outputs, [&](const Candidate& candidate) {
    return candidate.parsed.role != kOutput ||
           !fits_by_place(kOutput, candidate, sizes);
  });
  prefer_strong_names(outputs);
  // "linear.0" to "linear.3" are not four outputs.
  const bool has_output = outputs.size() == 1;
  std::vector<Candidate*> free;
  for (Candidate& candidate : candidates) {
    if (has_output && candidate.names == outputs[0].names) continue;
    constexpr Role kAny[] = {kQuery, kKey, kFused, kKeyValue};
    if (std::ranges::any_of(kAny, [&](Role role) {
          return fits_by_place(role, candidate, sizes);
        })) {
      free.push_back(&candidate);
    }
  }
  std::vector<std::vector<Role>> orders{
      {kQuery, kKey, kValue}, {kQuery, kKeyValue}, {kFused}};
  for (size_t i = 0; i < 3 && !has_output; ++i) {
    orders.push_back(orders[i]);
    orders.back().push_back(kOutput);
  }
  for (const std::vector<Role>& order : orders) {
    const auto fits = [&](Role role, const Candidate* candidate) {
      return fits_by_place(role, *candidate, sizes);
    };
    if (!std::ranges::equal(order, free, fits)) continue;
    // The shape of a fused matrix is a name.
    if (order[0] == kQuery && !names_are_in_order(free)) return;
    for (size_t i = 0; i < order.size(); ++i) {
      const std::string stem = free[i]->parsed.stem;
      for (Candidate& candidate : candidates) {
        if (candidate.parsed.stem != stem) continue;
        candidate.parsed.role = order[i];
        candidate.by_place = true;
      }
    }
    return;
  }
}

void prefer_strong_names(Candidates& candidates) {
  const auto is_weak = [](const Candidate& c) { return c.parsed.is_weak; };
  if (!std::ranges::all_of(candidates, is_weak)) {
    std::erase_if(candidates, is_weak);
  }
}

Candidates stack_heads(const Candidates& candidates, int64_t heads) {
  std::map<std::string, Candidates> lists;
  for (const Candidate& candidate : candidates) {
    lists[list_name(candidate.names[0])].push_back(candidate);
  }
  Candidates stacked;
  for (const auto& [name, members] : lists) {
    std::ranges::move(stack(members, heads), std::back_inserter(stacked));
  }
  return stacked;
}

int64_t heads_of(Role role, const LayerSizes& sizes) {
  const int64_t heads = sizes.num_heads, groups = sizes.num_kv_heads;
  return role == kFused                   ? heads + 2 * groups
         : role == kKeyValue              ? 2 * groups
         : role == kKey || role == kValue ? groups
                                          : heads;
}

std::string list_text(const Candidates& candidates, const char* glue) {
  std::string text;
  for (const Candidate& candidate : candidates) {
    text += c10::str(text.empty() ? "" : glue, candidate.name(), " ",
                     shape_text(candidate.tensor));
  }
  return text;
}

}  // namespace multihead::diagnosis
