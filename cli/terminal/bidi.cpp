// SPDX-License-Identifier: MIT
//
// Rules are named as UAX #9 names them. The unit is a cluster: marks stay with
// their letter, so that rule W1 has nothing to do.
#include "cli/terminal/bidi.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "cli/terminal/width.h"

namespace cli {
namespace {

using Class = utf8proc_bidi_class_t;
using Classes = std::vector<Class>;

constexpr Class L = UTF8PROC_BIDI_CLASS_L, R = UTF8PROC_BIDI_CLASS_R,
                AL = UTF8PROC_BIDI_CLASS_AL, EN = UTF8PROC_BIDI_CLASS_EN,
                AN = UTF8PROC_BIDI_CLASS_AN, ES = UTF8PROC_BIDI_CLASS_ES,
                ET = UTF8PROC_BIDI_CLASS_ET, CS = UTF8PROC_BIDI_CLASS_CS,
                ON = UTF8PROC_BIDI_CLASS_ON;

Class class_of(char32_t c) {
  return static_cast<Class>(
      utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->bidi_class);
}

bool is_number(Class c) { return c == EN || c == AN; }
bool is_neutral(Class c) { return c != L && c != R && !is_number(c); }

// W2 to W7, with L before the first letter: what digits and the signs around
// them belong to.
void resolve_numbers(Classes& classes) {
  Class strong = L;
  for (Class& c : classes) {
    if (c == L || c == R || c == AL) strong = c;
    if (c == EN && strong == AL) c = AN;  // W2
  }
  std::ranges::replace(classes, AL, R);  // W3
  for (size_t i = 1; i + 1 < classes.size(); ++i) {
    const Class before = classes[i - 1], after = classes[i + 1];
    if (before == after && ((before == EN && classes[i] == ES) ||
                            (is_number(before) && classes[i] == CS)))
      classes[i] = before;  // W4
  }
  for (size_t begin = 0, end; begin < classes.size(); begin = end) {  // W5
    end = begin + 1;
    if (classes[begin] != ET) continue;
    while (end < classes.size() && classes[end] == ET) ++end;
    if ((begin > 0 && classes[begin - 1] == EN) ||
        (end < classes.size() && classes[end] == EN))
      std::fill(classes.begin() + begin, classes.begin() + end, EN);
  }
  strong = L;
  for (Class& c : classes) {
    if (c == ES || c == ET || c == CS) c = ON;  // W6
    if (c == L || c == R) strong = c;
    if (c == EN && strong == L) c = L;  // W7
  }
}

// N1 and N2: signs between letters of one direction go with them, others with
// the line.
void resolve_neutrals(Classes& classes) {
  const auto side = [](Class c) { return is_number(c) ? R : c; };
  for (size_t begin = 0, end; begin < classes.size(); begin = end) {
    end = begin + 1;
    if (!is_neutral(classes[begin])) continue;
    while (end < classes.size() && is_neutral(classes[end])) ++end;
    const Class before = begin > 0 ? side(classes[begin - 1]) : L,
                after = end < classes.size() ? side(classes[end]) : L;
    std::fill(classes.begin() + begin, classes.begin() + end,
              before == after ? before : L);
  }
}

// L4, for the brackets that keyboards have.
char32_t mirrored(char32_t c) {
  constexpr std::u32string_view kPairs = U"()[]{}<>«»";
  const size_t at = kPairs.find(c);
  return at == kPairs.npos ? c : kPairs[at ^ 1];
}

}  // namespace

std::u32string visual_order(std::string_view text) {
  std::vector<std::u32string> letters;
  Classes classes;
  for (const std::string& cluster : clusters(text)) {
    letters.push_back(code_points(cluster));
    classes.push_back(class_of(letters.back()[0]));
  }
  resolve_numbers(classes);
  resolve_neutrals(classes);
  std::vector<int> levels;  // I1
  for (const Class c : classes)
    levels.push_back(is_number(c) ? 2 : c == R ? 1 : 0);
  for (size_t i = 0; i < letters.size(); ++i)
    if (levels[i] == 1) letters[i][0] = mirrored(letters[i][0]);
  for (const int level : {2, 1})  // L2
    for (size_t begin = 0, end; begin < letters.size(); begin = end) {
      end = begin + 1;
      if (levels[begin] < level) continue;
      while (end < letters.size() && levels[end] >= level) ++end;
      std::reverse(letters.begin() + begin, letters.begin() + end);
    }
  std::u32string line;
  for (const std::u32string& letter : letters) line += letter;
  return line;
}

}  // namespace cli
