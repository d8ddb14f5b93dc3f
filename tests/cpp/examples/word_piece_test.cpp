// SPDX-License-Identifier: MIT
//
// Text to the tokens of a model, as examples/bert_attention.cpp has it.
#include "word_piece.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace {

std::string pieces(const WordPiece& words, std::string_view text) {
  std::string line;
  for (const Token& token : words.tokenise(text)) line += token.text + " ";
  return line;
}

TEST(WordPiece, LongestPiecesFirst) {
  const WordPiece words("[UNK]\n[CLS]\n[SEP]\nnap\n##s\n##ping\n.\ncafe\n日\n");
  EXPECT_EQ(pieces(words, "Naps napping."),
            "[CLS] nap ##s nap ##ping . [SEP] ");
  EXPECT_EQ(pieces(words, "CAFÉ cafe\u0301"), "[CLS] cafe cafe [SEP] ");
  EXPECT_EQ(pieces(words, "dog"), "[CLS] [UNK] [SEP] ");
  EXPECT_EQ(pieces(words, "nap日nap"), "[CLS] nap 日 nap [SEP] ");
  EXPECT_EQ(pieces(words, std::string(101, 's')), "[CLS] [UNK] [SEP] ");
  EXPECT_EQ(pieces(words, " \n\t "), "[CLS] [SEP] ");
  EXPECT_EQ(words.tokenise("nap")[1].id, 3);
}

TEST(WordPiece, RefusesOtherFiles) {
  EXPECT_THROW(WordPiece("the\ncat\n"), std::invalid_argument);
}

}  // namespace
