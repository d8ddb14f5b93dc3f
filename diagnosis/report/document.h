// SPDX-License-Identifier: MIT
//
// A report before it is text, HTML or a picture: its words and their roles.
#pragma once

#include <string>
#include <vector>

namespace multihead::diagnosis {

enum class Emphasis { kPlain, kStrong, kDim, kGood, kBad, kCode, kOpen };

struct Span {
  std::string text;
  Emphasis emphasis = Emphasis::kPlain;
};
using Text = std::vector<Span>;

struct Block {
  enum class Kind {
    kPrompt,     ///< a command line, labelled "$"
    kHeadline,   ///< the verdict in one sentence, labelled with a mark
    kParagraph,  ///< what is wrong
    kNote,       ///< a label, and what there is to say under it
    kTable,      ///< the cases; the first row is the header
  };
  Kind kind = Kind::kParagraph;
  Span label = {};              ///< what stands left of the text: "✓", "repair"
  Text text = {};               ///< of all but tables
  std::vector<Text> rows = {};  ///< of a table: one span per cell
  bool folded = false;          ///< for who asks: only HTML shows it
};

using Document = std::vector<Block>;

/// What render_report says, in order.
Document document_of(const std::string& json);

}  // namespace multihead::diagnosis
