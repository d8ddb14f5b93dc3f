// SPDX-License-Identifier: MIT
//
// `multihead show`: finds the attention, measures it, draws it.
#include <ATen/core/grad_mode.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "cli/commands.h"
#include "cli/show/source.h"
#include "cli/show/text.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/output.h"
#include "cli/terminal/text.h"
#include "pictures/canvas.h"

namespace cli {
namespace {

constexpr const char* kFooter = R"(
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
)";

// The cells that an HTML page may hold, those of all items and heads together:
// a few megabytes; and the items.
constexpr int64_t kMostCells = 1'000'000, kMostItems = 32;

Colours detect_colours(const Terminal& terminal) {
  const std::string term = environment("TERM"),
                    colour = environment("COLORTERM");
  if (!terminal.colour) return Colours::kNone;
  if (colour == "truecolor" || colour == "24bit" || term.ends_with("-direct"))
    return Colours::kTrue;
  const bool plain =
      term.starts_with("vt") || term == "linux" || term == "ansi";
  return plain ? Colours::kNone : Colours::k256;
}

Screen detect_screen(const ShowOptions& options) {
  const Terminal terminal = detect_terminal();
  int64_t width = options.width;
  if (width == 0) width = terminal.width;
  if (width == 0) width = std::atoll(environment("COLUMNS").c_str());
  Screen screen{.width = static_cast<int>(width > 0 ? width : 80),
                .colours = detect_colours(terminal),
                .utf8 = terminal.utf8};
  if (options.colour == "true") screen.colours = Colours::kTrue;
  if (options.colour == "256") screen.colours = Colours::k256;
  if (options.colour == "none" || options.colour == "ascii")
    screen.colours = Colours::kNone;
  if (options.colour == "ascii") screen.utf8 = false;
  return screen;
}

int64_t parse_head(const std::string& text, const AttentionSource& source) {
  if (source.mean_of > 0)
    refuse("--head", "be all or mean, since the dump holds the mean of heads",
           text);
  int64_t head = -1;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, head).ptr != end || head < 0 ||
      head >= source.num_heads())
    refuse("--head",
           "be all, mean or a head from 0 to " +
               std::to_string(source.num_heads() - 1),
           text);
  return head;
}

MapRequest request_for(const AttentionSource& source,
                       const ShowOptions& options) {
  MapRequest request;
  const int64_t batch = source.batch_size();
  if (options.batch && *options.batch >= batch)
    refuse("--batch", "be an item from 0 to " + std::to_string(batch - 1),
           std::to_string(*options.batch));
  request.items = {options.batch.value_or(0)};
  if (!options.html.empty() && !options.batch) {
    request.items.resize(std::min(batch, kMostItems));
    std::iota(request.items.begin(), request.items.end(), 0);
  }
  request.mean_only = options.head == "mean";
  if (options.head != "mean" && options.head != "all")
    request.head = parse_head(options.head, source);
  const int64_t maps =
      static_cast<int64_t>(request.items.size()) *
      (request.head || request.mean_only ? 1 : source.num_heads() + 1);
  request.cells = static_cast<int>(std::clamp<double>(
      std::sqrt(static_cast<double>(kMostCells) / maps), 16, 256));
  return request;
}

Picture make_picture(const ShowOptions& options) {
  const AttentionSource source = find_attention(options);
  MapRequest request = request_for(source, options);
  if (!options.difference) return measure(source, request);
  const AttentionSource reference = find_reference(options);
  const auto sizes = [](const AttentionSource& a) {
    return std::vector{a.batch_size(), a.num_heads(), a.query_length(),
                       a.key_length()};
  };
  if (sizes(source) != sizes(reference))
    refuse("--difference",
           "have weights of the same shape, " + shape_text(sizes(source)),
           shape_text(sizes(reference)));
  request_for(reference, options);  // refuses a head of a mean
  request.mean_only |= source.mean_of > 0 || reference.mean_of > 0;
  return difference(measure(source, request), measure(reference, request));
}

// Options that would be ignored: each goes with a dump.
void refuse_unused(const ShowOptions& options) {
  if (!options.dump.empty()) return;
  for (const auto& [option, given] :
       {std::pair{"--weights", !options.weights.empty()},
        {"--mask", !options.mask.empty()},
        {"--tokens", !options.tokens.empty()},
        {"--query-tokens", !options.query_tokens.empty()},
        {"--batch", options.batch.has_value()},
        {"--difference", options.difference.has_value()},
        {"--num-heads", options.num_heads.has_value()}})
    if (given) refuse(option, "come with a dump", "none");
}

int show(const ShowOptions& options) {
  const at::NoGradGuard no_grad;
  Destination svg("show: --svg", options.svg), png("show: --png", options.png),
      html("show: --html", options.html);
  print_at_most_one("show", svg.standard_output() + png.standard_output() +
                                html.standard_output());
  if (png.wanted()) require_png("show: --png");
  refuse_unused(options);
  const Picture picture = make_picture(options);
  if (!svg.wanted() && !png.wanted() && !html.wanted())
    write_output(to_text(picture, detect_screen(options)));
  const Album album{.title = picture.title, .layers = {picture}};
  each_of({[&] { svg.write(to_svg, album); },
           [&] {
             if (png.wanted()) png.write(png_of(to_svg(album)));
           },
           [&] { html.write(to_html, album); }});
  return 0;
}

}  // namespace

void add_show(CLI::App& app, Action& action) {
  const auto options = std::make_shared<ShowOptions>();
  CLI::App* command = app.add_subcommand(
      "show", "Draw attention weights: terminal, SVG, PNG, HTML");
  command->footer(kFooter);
  const auto text = [&](const char* name, std::string& to, const char* type,
                        const char* what) {
    return command->add_option(name, to, what)->type_name(type);
  };
  text("DUMP", options->dump, "FILE", "Tensors of one run of attention")
      ->check(is_named)
      ->check(is_dump);
  text("--weights", options->weights, "FILE",
       "A layer's parameters, if elsewhere")
      ->check(is_named)
      ->check(is_dump);
  text("--tokens", options->tokens, "TOKENS",
       "Names of the keys: words, or a JSON array");
  text("--query-tokens", options->query_tokens, "TOKENS",
       "Of the queries; default: those of the keys");
  text("--mask", options->mask, "KIND", "What the mask of the dump means")
      ->check(CLI::IsMember({"blocked", "keep", "additive"}));
  command
      ->add_option("--num-heads", options->num_heads,
                   "If the file does not say")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--batch", options->batch, "Item of the batch; default: 0")
      ->check(CLI::NonNegativeNumber);
  text("--head", options->head, "N|mean|all", "What to draw")
      ->capture_default_str();
  command
      ->add_option("--difference", options->difference,
                   "Draw what is left after FILE's weights are subtracted; "
                   "without FILE, those that follow from the dump's inputs")
      ->expected(0, 1)
      ->type_name("FILE");
  text("--color", options->colour, "WHICH", "auto, true, 256, none or ascii")
      ->check(CLI::IsMember({"auto", "true", "256", "none", "ascii"}))
      ->capture_default_str();
  command
      ->add_option("--width", options->width,
                   "Columns; default: the terminal's")
      ->check(CLI::Range(20, 10000));
  text("--svg", options->svg, "FILE", "Write a picture for documents")
      ->check(is_named);
  text("--png", options->png, "FILE", "Write a picture of pixels")
      ->check(is_named);
  text("--html", options->html, "FILE", "Write a page to explore, offline too")
      ->check(is_named);
  command->callback(
      [&action, options] { action = [options] { return show(*options); }; });
}

}  // namespace cli
