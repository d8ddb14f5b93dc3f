// SPDX-License-Identifier: MIT
//
// What arguments have to be beyond what their types say, and what is said of a
// command line that cannot be understood.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "multihead/safetensors.h"

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace cli {

/// Checks of single arguments: what is wrong, "" if nothing is.
/// An empty variable of a shell is no file, nor as good as no argument.
std::string is_named(const std::string& path);
/// A seed of 64 bits. The parser would take "-1", and larger ones, for others.
std::string is_seed(const std::string& text);
/// No dump, for certain.
std::string is_code(const std::string& target);
/// No other kind of file, for certain; says what to do with it.
std::string is_dump(const std::string& path);

/// Adds an option that takes the name of a file to write.
void add_file(CLI::App& command, const std::string& name, std::string& path,
              const std::string& what);

/// multihead::read_safetensors, whose error, where there is no such file, also
/// says which one may have been meant.
multihead::Safetensors read_dump(const std::string& path);

/// Answers --help and --version on standard output. Where a command line cannot
/// be understood, says on standard error which part of it, and what may have
/// been meant. Returns the exit status, 0 or 2.
int answer(const CLI::App& app, const CLI::ParseError& error);

/// The one of `names` that differs least from `word` by letters that are
/// missing, added, changed or swapped, of either case; a beginning differs by
/// one. "" where more than every third letter would be wrong.
std::string nearest(std::string_view word,
                    const std::vector<std::string>& names);

/// "no case matches "causl"; did you mean "causal"?", for a filter that none of
/// the titles contains: in letters of other cases, or word by word.
std::string no_case_matches(const std::string& filter,
                            const std::vector<std::string>& titles);

/// "; did you mean X?" for a path to nothing: a file or folder with a similar
/// name. "" if there is something at `path`.
std::string did_you_mean_file(const std::string& path);

}  // namespace cli
