# SPDX-License-Identifier: MIT
# Writes the source `to` with the commit that is checked out in `root`, "" where that is
# no checkout or git is not there. It stays as it is where nothing changed.
set(commit "")
if(EXISTS "${root}/.git")  # not that of a folder around an unpacked archive
  set(ENV{GIT_OPTIONAL_LOCKS} 0)
  execute_process(COMMAND git -C "${root}" describe --always --dirty --exclude *
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE failed)
  if(failed)
    set(commit "")
  endif()
endif()
file(CONFIGURE OUTPUT "${to}" CONTENT [[
namespace cli {
extern const char* const kCommit;
const char* const kCommit = "@commit@";
}  // namespace cli
]] @ONLY)
