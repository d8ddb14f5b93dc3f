// SPDX-License-Identifier: MIT
#include "diagnosis/weights/names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <vector>

namespace multihead::diagnosis {
namespace {

using std::string_view;
using enum Role;

struct Word {
  string_view text;
  Role role;
  bool is_weak = false;
};

// Without case and underscores, and without what decorates them: W_q, q_proj,
// linear_q, toqueries are all q or queries.
constexpr Word kWords[] = {
    {"q", kQuery},
    {"qs", kQuery},
    {"query", kQuery},
    {"queries", kQuery},
    {"k", kKey},
    {"ks", kKey},
    {"key", kKey},
    {"keys", kKey},
    {"v", kValue},
    {"vs", kValue},
    {"value", kValue},
    {"values", kValue},
    {"o", kOutput},
    {"out", kOutput},
    {"output", kOutput},
    {"attentionoutput", kOutput},
    {"cproj", kOutput},
    {"attnoutput", kOutput},
    {"concat", kOutput},
    {"unifyheads", kOutput},
    {"qkv", kFused},
    {"combineheads", kOutput},
    {"cattn", kFused},
    {"querykeyvalue", kFused},
    {"inproj", kFused},
    {"kv", kKeyValue},
    {"keyvalue", kKeyValue},
    {"fc", kOutput, true},
    {"dense", kOutput, true},
    {"proj", kOutput, true},
    {"projection", kOutput, true},
    {"final", kOutput, true},
    {"linear", kOutput, true},
};

// The empty one first: a name is tried as it is before it is taken apart.
constexpr string_view kPrefixes[] = {"",      "w",    "to",         "linear",
                                     "lin",   "proj", "projection", "fc",
                                     "dense", "conv"};
constexpr string_view kSuffixes[] = {
    "",    "proj",  "projs", "projection", "projections", "linear",
    "lin", "layer", "dense", "linears",    "fc",          "w",
    "net", "heads", "head",  "matrix",     "transform",   "conv"};

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
      const auto* word = std::ranges::find(
          kWords, rest.substr(0, rest.size() - suffix.size()), &Word::text);
      if (word != std::end(kWords)) return word;
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

}  // namespace

const char* role_text(Role role) {
  constexpr std::array texts{"",
                             "query",
                             "key",
                             "value",
                             "output",
                             "query, key and value",
                             "key and value"};
  return texts[static_cast<size_t>(role)];
}

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

bool is_list_of_layers(const std::string& list_name) {
  constexpr string_view kLayers[] = {"layer.*",  "layers.*", "layer_*",
                                     "blocks.*", "block.*",  "block_*"};
  return std::ranges::any_of(kLayers, [&](string_view layers) {
    return list_name.find(layers) != std::string::npos;
  });
}

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

}  // namespace multihead::diagnosis
