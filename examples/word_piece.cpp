// SPDX-License-Identifier: MIT
#include "word_piece.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <stdexcept>

namespace {

constexpr size_t kLongestWord = 100;  // code points; longer ones are unknown

std::u32string code_points(std::string_view text) {
  std::u32string points;
  while (!text.empty()) {
    utf8proc_int32_t point = 0;
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    const auto length = utf8proc_iterate(
        bytes, static_cast<utf8proc_ssize_t>(text.size()), &point);
    points += length > 0 ? static_cast<char32_t>(point) : U'\uFFFD';
    text.remove_prefix(length > 0 ? length : 1);
  }
  return points;
}

std::string to_utf8(char32_t c) {
  utf8proc_uint8_t bytes[4];
  const auto length =
      utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes);
  return {reinterpret_cast<const char*>(bytes), static_cast<size_t>(length)};
}

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool is_space(char32_t c) {
  return c == '\t' || c == '\n' || c == '\r' ||
         category(c) == UTF8PROC_CATEGORY_ZS;
}

bool is_left_out(char32_t c) {
  const auto kind = category(c);
  return c == 0 || c == 0xFFFD || kind == UTF8PROC_CATEGORY_CN ||
         kind >= UTF8PROC_CATEGORY_CC;
}

// Every sign of ASCII counts as punctuation, of the others what Unicode does.
bool is_punctuation(char32_t c) {
  if (c < 0x80) return std::ispunct(static_cast<unsigned char>(c)) != 0;
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_PC && kind <= UTF8PROC_CATEGORY_PO;
}

// The letter in lower case, without its accents.
std::u32string plain(char32_t c) {
  std::array<utf8proc_int32_t, 8> parts;
  int unused = 0;
  const auto count =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts.data(),
                              parts.size(), UTF8PROC_DECOMPOSE, &unused);
  std::u32string letters;
  for (int i = 0; i < count; ++i)
    if (category(parts[i]) != UTF8PROC_CATEGORY_MN)
      letters += static_cast<char32_t>(utf8proc_tolower(parts[i]));
  return letters;
}

bool is_chinese(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x20000 && c <= 0x2FA1F);
}

std::vector<std::string> split_words(std::string_view text, bool lower_case) {
  std::vector<std::string> words;
  bool within = false;
  for (const char32_t c : code_points(text)) {
    if (is_space(c)) within = false;
    if (is_space(c) || is_left_out(c)) continue;
    for (const char32_t letter : lower_case ? plain(c) : std::u32string(1, c)) {
      const bool alone = is_punctuation(letter) || is_chinese(letter);
      if (!within || alone) words.emplace_back();
      words.back() += to_utf8(letter);
      within = !alone;
    }
  }
  return words;
}

}  // namespace

WordPiece::WordPiece(std::string_view vocabulary, bool lower_case)
    : lower_case_(lower_case) {
  int64_t line = 0;
  while (!vocabulary.empty()) {
    const size_t end = std::min(vocabulary.find('\n'), vocabulary.size());
    std::string_view word = vocabulary.substr(0, end);
    if (word.ends_with('\r')) word.remove_suffix(1);
    ids_.emplace(word, line++);
    vocabulary.remove_prefix(std::min(end + 1, vocabulary.size()));
  }
  for (const char* special : {"[CLS]", "[SEP]", "[UNK]"})
    if (!ids_.contains(special))
      throw std::invalid_argument(std::string("--vocab must have a line ") +
                                  special + ", got " + std::to_string(line) +
                                  " others");
}

Token WordPiece::token(const std::string& text) const {
  return {ids_.at(text), text};
}

void WordPiece::add_pieces(const std::string& word,
                           std::vector<Token>& to) const {
  const std::u32string letters = code_points(word);
  std::vector<Token> pieces;
  size_t begin = 0;
  while (begin < letters.size() && letters.size() <= kLongestWord) {
    size_t end = letters.size();
    std::string piece;
    for (; end > begin; --end) {
      piece = begin > 0 ? "##" : "";
      for (size_t i = begin; i < end; ++i) piece += to_utf8(letters[i]);
      if (ids_.contains(piece)) break;
    }
    if (end == begin) break;
    pieces.push_back(token(piece));
    begin = end;
  }
  if (begin < letters.size()) pieces = {token("[UNK]")};
  to.insert(to.end(), pieces.begin(), pieces.end());
}

std::vector<Token> WordPiece::tokenise(std::string_view text) const {
  std::vector<Token> tokens = {token("[CLS]")};
  for (const std::string& word : split_words(text, lower_case_))
    add_pieces(word, tokens);
  tokens.push_back(token("[SEP]"));
  return tokens;
}
