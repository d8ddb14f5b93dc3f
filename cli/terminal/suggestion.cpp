// SPDX-License-Identifier: MIT
#include "cli/terminal/suggestion.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

namespace cli {
namespace {

namespace fs = std::filesystem;

std::string lower(std::string text) {
  for (char& c : text)
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Without dashes in front, in lower case.
std::string plain(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  return lower(std::string(word));
}

// How many letters are to be added, removed, changed, or swapped with the next
// one, to make one word of the other (Damerau 1964, Wagner and Fischer 1974).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min(
          {last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

// How far a name is from the word; nullopt: it will not have been meant.
std::optional<size_t> remoteness(std::string_view word, std::string_view name) {
  const std::string a = plain(word), b = plain(name);
  if (a == b) return 0;
  if (a.size() > 1 && b.starts_with(a)) return 1;
  if (b.size() > 2 && a.starts_with(b)) return 1;
  const size_t wrong = distance(a, b);
  const size_t most = std::max<size_t>(1, std::max(a.size(), b.size()) / 3);
  if (wrong > most || wrong >= std::min(a.size(), b.size())) return {};
  return wrong;
}

// The path of what has the nearest name in a folder; "" where none is near.
fs::path neighbour(const fs::path& folder, const fs::path& name) {
  fs::path found;
  std::optional<size_t> least;
  std::error_code none;
  for (const auto& entry :
       fs::directory_iterator(folder.empty() ? "." : folder, none)) {
    const fs::path other = entry.path().filename();
    // An ending that both have is no sign that they are near.
    const bool alike = name.extension() == other.extension();
    const auto far = remoteness((alike ? name.stem() : name).string(),
                                (alike ? other.stem() : other).string());
    if (!far || (least && (*far > *least || (*far == *least && other > found))))
      continue;
    least = far;
    found = other;
  }
  return found.empty() ? found : folder / found;
}

// The existing path that is most like one to nothing; "" where none is.
fs::path nearest_path(const fs::path& path) {
  std::error_code none;
  if (path.empty() || fs::exists(path, none)) return path;
  const fs::path above = path.parent_path();
  if (above == path) return {};
  const fs::path folder = nearest_path(above);
  if (folder.empty() && !above.empty()) return {};
  if (fs::exists(folder / path.filename(), none))
    return folder / path.filename();
  return neighbour(folder, path.filename());
}

// The filter as some title has it, in letters of any case.
std::string in_other_case(const std::string& filter,
                          const std::vector<std::string>& titles) {
  for (const std::string& title : titles)
    if (const size_t at = lower(title).find(lower(filter)); at != title.npos)
      return title.substr(at, filter.size());
  return "";
}

// The filter with each of its words the nearest of those in titles, if one of
// them has these beside each other.
std::string word_by_word(const std::string& filter,
                         const std::vector<std::string>& titles) {
  const auto split = [](std::string text) {
    std::ranges::replace(text, ':', ' ');
    std::ranges::replace(text, ',', ' ');
    std::istringstream words(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(words),
                                    {});
  };
  std::vector<std::string> all;
  for (const std::string& title : titles)
    for (std::string& word : split(title)) all.push_back(std::move(word));
  std::string guess;
  for (const std::string& word : split(filter))
    guess += (guess.empty() ? "" : " ") + nearest(word, all);
  const bool there = std::ranges::any_of(
      titles, [&](const std::string& t) { return t.find(guess) != t.npos; });
  return there ? guess : "";
}

std::string question(const std::string& name) {
  return name.empty() ? "" : "; did you mean " + name + "?";
}

}  // namespace

std::string nearest(std::string_view word,
                    const std::vector<std::string>& names) {
  std::string found;
  std::optional<size_t> least;
  for (const std::string& name : names)
    if (const auto far = remoteness(word, name);
        far && (!least || far < least)) {
      least = far;
      found = name;
    }
  return found;
}

std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& names) {
  return question(nearest(word, names));
}

std::string no_case_matches(const std::string& filter,
                            const std::vector<std::string>& titles) {
  std::string guess = in_other_case(filter, titles);
  if (guess.empty()) guess = word_by_word(filter, titles);
  return "no case matches \"" + filter + "\"" +
         question(guess.empty() ? "" : "\"" + guess + "\"");
}

std::string did_you_mean_file(const std::string& path) {
  std::error_code none;
  if (path.empty() || fs::exists(path, none)) return "";
  // A broken link is there, and its name is right.
  if (fs::is_symlink(fs::symlink_status(path, none))) return "";
  return question(nearest_path(path).string());
}

}  // namespace cli
