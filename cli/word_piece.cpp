// SPDX-License-Identifier: MIT
#include "cli/word_piece.h"

#include <locale.h>
#include <wctype.h>

#include <stdexcept>

#include "cli/unicode_text.h"

namespace cli {
namespace {

constexpr size_t kLongestWord = 100;  // code points; longer ones are unknown

// U+00C0 to U+017F without their accents; '.' stays as it is.
constexpr std::u32string_view kBases =
    U"AAAAAA.CEEEEIIII.NOOOOO..UUUUY..aaaaaa.ceeeeiiii.nooooo..uuuuy.y"
    U"AaAaAaCcCcCcCcDd..EeEeEeEeEeGgGgGgGgHh..IiIiIiIiI...JjKk.LlLlLl"
    U"....NnNnNn...OoOoOo..RrRrRrSsSsSsSsTtTt..UuUuUuUuUuUuWwYyYZzZzZz.";

char32_t without_accent(char32_t c) {
  if (c < 0xC0 || c - 0xC0 >= kBases.size()) return c;
  const char32_t base = kBases[c - 0xC0];
  return base == U'.' ? c : base;
}

char32_t lower(char32_t c) {
  static const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  if (c < 0x80 || !utf8) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  return static_cast<char32_t>(towlower_l(static_cast<wint_t>(c), utf8));
}

bool is_accent(char32_t c) { return c >= 0x300 && c <= 0x36F; }

bool is_space(char32_t c) {
  return c == ' ' || (c >= 0x09 && c <= 0x0D) || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_left_out(char32_t c) {
  return c == 0 || c == 0xFFFD || c < 0x20 || (c >= 0x7F && c < 0xA0) ||
         c == 0xAD || (c >= 0x200B && c <= 0x200F) ||
         (c >= 0x202A && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) ||
         c == 0xFEFF;
}

// Every sign of ASCII counts as punctuation, of the others what Unicode does.
bool is_punctuation(char32_t c) {
  if (c < 0x80)
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) ||
           (c >= 91 && c <= 96) || (c >= 123 && c <= 126);
  return std::u32string_view(U"¡§«¶·»¿").find(c) != std::u32string_view::npos ||
         (c >= 0x2010 && c <= 0x2027) ||
         (c >= 0x2030 && c <= 0x205E && c != 0x2044 && c != 0x2052) ||
         (c >= 0x3001 && c <= 0x3003) || (c >= 0x3008 && c <= 0x3011) ||
         (c >= 0x3014 && c <= 0x301F) || c == 0x30FB ||
         (c >= 0xFF01 && c <= 0xFF0F && c != 0xFF04 && c != 0xFF0B) ||
         c == 0xFF1A || c == 0xFF1B || c == 0xFF1F || c == 0xFF20;
}

bool is_chinese(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x20000 && c <= 0x2FA1F);
}

std::vector<std::string> split_words(std::string_view text, bool lower_case) {
  std::vector<std::string> words;
  bool within = false;
  for (char32_t c : code_points(text)) {
    if (is_space(c)) {
      within = false;
      continue;
    }
    if (is_left_out(c) || (lower_case && is_accent(c))) continue;
    if (lower_case) c = lower(without_accent(c));
    const bool alone = is_punctuation(c) || is_chinese(c);
    if (!within || alone) words.emplace_back();
    words.back() += to_utf8(c);
    within = !alone;
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
      throw std::invalid_argument(
          std::string("show: --vocab must have a line ") + special + ", got " +
          std::to_string(line) + " others");
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

}  // namespace cli
