// SPDX-License-Identifier: MIT
//
// The sub-commands of `multihead`.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace cli {

/// What the chosen sub-command does; returns the exit status.
using Action = std::function<int()>;

/// Each adds its sub-command, with options and help, to `app`; parsing a
/// command line then sets `action` to that of the sub-command that was chosen.
void add_verify(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_show(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

}  // namespace cli
