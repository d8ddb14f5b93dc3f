// SPDX-License-Identifier: MIT
//
// The sub-commands of `multihead`. Each returns the exit status.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cli {

struct VerifyOptions {
  bool json = false;
  uint64_t seed = 0;
  std::string filter;  ///< part of "group: case"; empty = all
};
/// Compares this library with PyTorch; 0 if every case agrees, 1 if
/// one does not, 2 if the filter leaves none.
int verify(const VerifyOptions& options);

struct InfoOptions {
  bool json = false;
};
/// Says what this build is and where it runs.
int info(const InfoOptions& options);

struct BenchOptions {
  std::string filter;        ///< part of "group: case sizes"; empty = all
  bool full = false;         ///< every case, not the standard grid
  bool list = false;         ///< name the cases instead of running them
  std::vector<int> threads;  ///< empty: 1, and all
  int rounds = 10;           ///< at least so many, except of slow calls
  double seconds = 1;        ///< for the calls of one case, roughly
  bool quick = false;        ///< few rounds, for a look
  bool same_isa = false;     ///< PyTorch uses what our kernels do: no AMX
  uint64_t seed = 0;
  /// Files that get the result, "-" for standard output; empty: none.
  std::string json, csv, markdown, svg;
};
/// Times this library beside PyTorch; 0 if all that ours returned is right, 1
/// if not, 2 if the filter leaves no case.
int bench(const BenchOptions& options);

/// What becomes of a report beside its text on standard output.
struct ReportOutput {
  bool json = false;  ///< print JSON instead
  /// Files, "-" for standard output instead of the text; empty: none.
  std::string html, svg;
};

struct CheckOptions {
  std::string target;                  ///< "file.py" or "file.py:name"
  std::vector<std::string> passed_on;  ///< to Python's multihead.check
  double time_limit = 20;              ///< seconds, for the code under test
  ReportOutput output = {};
};
/// Says whether the attention in a Python file is right; 0 if it is, 1 if not,
/// 2 if it could not be checked, 130 if somebody interrupted.
int check(const CheckOptions& options);

struct ExplainOptions {
  std::vector<std::string> files;  ///< dumps, .safetensors: one run in each
  std::map<std::string, std::string> facts;  ///< in place of their metadata
  ReportOutput output = {};
};
/// Says whether the attention that made saved tensors is right
/// (multihead/explain.h); 0 if it is, 1 if not.
int explain(const ExplainOptions& options);

struct ShowOptions {
  std::string dump;          ///< a file of tensors; empty: model, or example
  std::string weights;       ///< a file with a layer's parameters
  std::string model, vocab;  ///< a BERT: folder or file; its vocabulary
  std::string text;          ///< what the model reads
  std::optional<int64_t> layer;      ///< of the model; default: 0
  std::string tokens, query_tokens;  ///< words, or a JSON array
  std::string mask;                  ///< blocked, keep, additive; "": the dump
  std::optional<int64_t> num_heads;
  std::optional<int64_t> batch;  ///< this item; else the first, HTML: all
  std::string head = "all";      ///< a number, "mean" or "all"
  std::optional<std::string> difference;  ///< a dump; "": what it should be
  std::string colour = "auto";
  int64_t width = 0;  ///< columns; 0: the terminal's
  std::string png, svg, html;
};
/// Shows attention weights in the terminal, or in the files that are named; 0.
int show(const ShowOptions& options);

}  // namespace cli
