// SPDX-License-Identifier: MIT
#include "cli/terminal/arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/terminal/output.h"
#include "multihead/text/printable.h"

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

// The first of the names that are nearest by `remoteness_of`; "": none is near.
std::string nearest_by(const std::vector<std::string>& names,
                       const auto& remoteness_of) {
  std::string found;
  std::optional<size_t> least;
  for (const std::string& name : names)
    if (const auto far = remoteness_of(name); far && (!least || far < least)) {
      least = far;
      found = name;
    }
  return found;
}

// The path of what has the nearest name in a folder; "" where none is near.
fs::path neighbour(const fs::path& folder, const fs::path& name) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry :
       fs::directory_iterator(folder.empty() ? "." : folder, none))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  const std::string found = nearest_by(names, [&](const fs::path& other) {
    // An ending that both have is no sign that they are near.
    const bool alike = name.extension() == other.extension();
    return remoteness((alike ? name.stem() : name).string(),
                      (alike ? other.stem() : other).string());
  });
  return found.empty() ? fs::path() : folder / found;
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

// What the arguments that the parser does not know may have meant.
std::string meant(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  std::vector<std::string> options, commands = {"--help", "--version"};
  for (const CLI::Option* option :
       static_cast<const CLI::App&>(chosen.empty() ? app : *chosen[0])
           .get_options())
    for (const std::string& name : option->get_lnames())
      options.push_back("--" + name);
  for (const CLI::App* command :
       app.get_subcommands([](auto*) { return true; }))
    commands.push_back(command->get_name());
  for (const std::string& argument : app.remaining(/*recurse=*/true)) {
    const bool is_option = argument.starts_with('-');
    if (!is_option && !chosen.empty()) continue;
    const std::string name = nearest(argument.substr(0, argument.find('=')),
                                     is_option ? options : commands);
    if (!name.empty()) return "Did you mean " + name + "?\n";
  }
  return "";
}

}  // namespace

std::string nearest(std::string_view word,
                    const std::vector<std::string>& names) {
  return nearest_by(
      names, [&](const std::string& name) { return remoteness(word, name); });
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

std::string is_named(const std::string& path) {
  return path.empty() ? "the name of the file must not be empty" : "";
}

std::string is_code(const std::string& target) {
  return target.ends_with(".safetensors")
             ? target + " is a dump: multihead explain " + target
             : "";
}

std::string is_seed(const std::string& text) {
  uint64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, seed);
  return last == end && error == std::errc()
             ? ""
             : "must be a whole number from 0 to 18446744073709551615, got " +
                   text;
}

std::string is_dump(const std::string& path) {
  const std::string kind = std::filesystem::path(path).extension().string();
  if (kind == ".py" || kind == ".ipynb")
    return path + " is code: multihead check " + path;
  for (const char* other : {".npy", ".npz", ".pt", ".pth", ".pkl", ".bin"})
    if (kind == other)
      return path +
             " must be .safetensors; docs/explain.md says how to save it so";
  return "";
}

void add_file(CLI::App& command, const std::string& name, std::string& path,
              const std::string& what) {
  command.add_option(name, path, what)->check(is_named)->type_name("FILE");
}

multihead::Safetensors read_dump(const std::string& path) {
  try {
    return multihead::read_safetensors(path);
  } catch (const std::runtime_error& error) {
    const std::string hint = did_you_mean_file(path);
    if (hint.empty()) throw;
    throw std::runtime_error(error.what() + hint);
  }
}

int answer(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream said, wrong;
  if (app.exit(error, said, wrong) == 0) {
    write_output(said.str());
    return 0;
  }
  const std::string text = std::string(error.what()) + "\n" + meant(app) +
                           "Run with --help for more information.\n";
  std::fputs(multihead::printable(text, "\n").c_str(), stderr);
  return 2;
}

}  // namespace cli
