// SPDX-License-Identifier: MIT
//
// Text to the tokens of an uncased BERT, by its vocabulary: words and
// punctuation, then the longest pieces that the vocabulary has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

struct Token {
  int64_t id;
  std::string text;  ///< "kitten", "##s", "[CLS]"
};

class WordPiece {
 public:
  /// vocabulary: one token a line, whose number is the line's. Throws
  /// std::invalid_argument where [CLS], [SEP] or [UNK] is missing.
  explicit WordPiece(std::string_view vocabulary, bool lower_case = true);

  /// [CLS] … [SEP]. Lower case and without accents, if the vocabulary is of
  /// that kind; every Chinese character is a word.
  std::vector<Token> tokenise(std::string_view text) const;

 private:
  Token token(const std::string& text) const;
  void add_pieces(const std::string& word, std::vector<Token>& to) const;

  std::unordered_map<std::string, int64_t> ids_;
  bool lower_case_;
};
