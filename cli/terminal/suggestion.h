// SPDX-License-Identifier: MIT
//
// "did you mean": the nearest of the names that there are.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cli {

/// The one of `names` that differs least from `word` by letters that are
/// missing, added, changed or swapped, of either case; a beginning differs by
/// one. "" where more than every third letter would be wrong.
std::string nearest(std::string_view word,
                    const std::vector<std::string>& names);

/// "; did you mean X?" for such a name, else "".
std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& names);

/// "no case matches "causl"; did you mean "causal"?", for a filter that none of
/// the titles contains: in letters of other cases, or word by word.
std::string no_case_matches(const std::string& filter,
                            const std::vector<std::string>& titles);

/// The same for a path to nothing: X is a file or folder with a similar name.
/// "" if there is something at `path`.
std::string did_you_mean_file(const std::string& path);

}  // namespace cli
