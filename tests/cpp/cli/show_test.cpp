// SPDX-License-Identifier: MIT
//
// The parts of `multihead show` that need no attention: text of any script,
// cells, colours, tokens, and lines that fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "cli/show/text.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/text.h"

namespace {

using namespace cli;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- Text -------------------------------------------------------------------

TEST(UnicodeText, ColumnsOfScripts) {
  EXPECT_EQ(columns("cat"), 3);
  EXPECT_EQ(columns("日本"), 4);
  EXPECT_EQ(columns("e\u0301"), 1);
  EXPECT_EQ(columns("שלום"), 4);
  EXPECT_EQ(columns("🙂"), 2);
  EXPECT_EQ(columns("👩‍👩‍👧"), 2);
  EXPECT_EQ(columns("👍🏽"), 2);
  EXPECT_EQ(columns("🇩🇪🇫🇷"), 4);
  EXPECT_EQ(columns("❤️"), 2);
  EXPECT_EQ(columns(""), 0);
}

TEST(UnicodeText, ClustersKeepTogetherWhatIsOneLetter) {
  std::vector<std::string> letters;
  for (const auto& cluster : clusters("ae\u0301b"))
    letters.push_back(cluster.text);
  EXPECT_EQ(letters, (std::vector<std::string>{"a", "e\u0301", "b"}));
  EXPECT_EQ(clusters("👩‍👩‍👧x").size(), 2u);
  EXPECT_EQ(clusters("🇩🇪🇫🇷").size(), 2u);
}

TEST(UnicodeText, NothingPrintedMovesTheCursor) {
  EXPECT_EQ(printable("a\nb\tc\r"), "a\\nb\\tc\\r");
  EXPECT_EQ(printable("\033[31m\x7f"), "\\x1b[31m\\x7f");
  EXPECT_EQ(printable("\u009b2J"), "\\x9b2J");
  EXPECT_EQ(printable("\u202eabc\u2066"), "\\u202eabc\\u2066");
  EXPECT_EQ(printable("\ufeff\u2028\uffff"), "\\ufeff\\u2028\\uffff");
  EXPECT_EQ(printable("a\n\033", "\n"), "a\n\\x1b");
  EXPECT_EQ(label(""), "\"\"");
  EXPECT_EQ(label("\t"), "\\t");
  EXPECT_EQ(printable("naïve 日本 👍🏽"), "naïve 日本 👍🏽");
}

TEST(UnicodeText, BytesThatAreNoUtf8AreEscaped) {
  EXPECT_EQ(printable("a\xff"), "a\\xff");
  EXPECT_EQ(printable("\xc3"), "\\xc3");                    // cut short
  EXPECT_EQ(printable("\xc0\x80"), "\\xc0\\x80");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // surrogate
  EXPECT_EQ(printable("\xf5\x80\x80\x80"), "\\xf5\\x80\\x80\\x80");
}

TEST(UnicodeText, FitsAnyWidthExactly) {
  for (const char* text :
       {"cat", "日本語日本語", "a日b本", "👩‍👩‍👧👍🏽x", ""})
    for (int width = 0; width < 12; ++width) {
      EXPECT_EQ(columns(padded(text, width)), width) << text;
      EXPECT_EQ(columns(padded(text, width, true)), width) << text;
      EXPECT_LE(columns(shortened(text, width)), width) << text;
    }
  EXPECT_EQ(shortened("kitten", 4), "kit…");
  EXPECT_EQ(shortened("日本語", 4), "日…");
  EXPECT_EQ(padded("a", 3, true), "  a");
}

TEST(UnicodeText, KnowsDirection) {
  EXPECT_TRUE(is_right_to_left("שלום"));
  EXPECT_TRUE(is_right_to_left("a مرحبا"));
  EXPECT_FALSE(is_right_to_left("日本 é"));
  EXPECT_TRUE(is_right_to_left("\xff ש"));
}

// The orders are those of GNU FriBidi, --ltr. U+05D0 to U+05D2 are Hebrew.
TEST(Suggestion, NearestName) {
  const std::vector<std::string> names = {"verify",  "bench", "check",
                                          "explain", "show",  "info"};
  EXPECT_EQ(nearest("verfy", names), "verify");
  EXPECT_EQ(nearest("hsow", names), "show");
  EXPECT_EQ(nearest("Explian", names), "explain");
  EXPECT_EQ(nearest("exp", names), "explain");
  EXPECT_EQ(nearest("benchmark", names), "bench");
  EXPECT_EQ(nearest("plot", names), "");
  EXPECT_EQ(nearest("x", names), "");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("help", {"--head", "--help"}), "--help");
  EXPECT_EQ(nearest("--num-haeds", {"--num-heads", "--head"}), "--num-heads");
}

TEST(Suggestion, FilterThatMatchesNothing) {
  const std::vector<std::string> titles = {"forward: causal d64 B1 H8",
                                           "backward: key padding B1"};
  EXPECT_EQ(no_case_matches("Causal D64", titles),
            "no case matches \"Causal D64\"; did you mean \"causal d64\"?");
  EXPECT_EQ(no_case_matches("causl d64", titles),
            "no case matches \"causl d64\"; did you mean \"causal d64\"?");
  EXPECT_EQ(no_case_matches("causl padding", titles),
            "no case matches \"causl padding\"");
  EXPECT_EQ(no_case_matches("zzz", titles), "no case matches \"zzz\"");
}

TEST(UnicodeText, Markup) {
  EXPECT_EQ(escaped("<b a=\"x\">&'"), "&lt;b a=&quot;x&quot;&gt;&amp;'");
}

// ---- Cells ------------------------------------------------------------------

TEST(Axis, CellsAreAlikeAndCoverEverything) {
  for (const int64_t length : {1, 7, 64, 100, 4096})
    for (const int cells : {1, 3, 10, 256}) {
      const Axis axis = make_axis(length, cells);
      EXPECT_EQ(axis.length(), length);
      EXPECT_LE(axis.cells(), cells);
      for (int i = 0; i + 1 < axis.cells(); ++i)
        EXPECT_EQ(axis.count(i), axis.count(0));
      EXPECT_LE(axis.count(axis.cells() - 1), axis.count(0));
      EXPECT_EQ(axis.pooled(), axis.cells() < length);
    }
}

TEST(Axis, Labels) {
  EXPECT_EQ(make_axis(3, 3).label(1), "1");
  EXPECT_EQ(make_axis(3, 3, {"a", "b", "c"}).label(1), "b");
  EXPECT_EQ(make_axis(4, 2).label(1), "2–3");
  EXPECT_EQ(make_axis(4, 2, {"a", "b", "c", "d"}).label(1), "2–3 c");
}

HeatMap example(int rows, int columns) {
  HeatMap map{rows, columns, {}, std::vector<uint8_t>(rows * columns, 0)};
  for (int i = 0; i < rows * columns; ++i)
    map.values.push_back(static_cast<float>((i * 7 + 3) % 11));
  return map;
}

TEST(HeatMap, PoolsSumsOverKeysMeansOverQueries) {
  HeatMap map{2, 3, {1, 2, 3, 4, 5, 6}, {1, 1, 0, 1, 1, 0}};
  const Axis queries = make_axis(2, 2), keys = make_axis(3, 3);
  const Axis one = make_axis(2, 1), two = make_axis(3, 2);
  const HeatMap pooled = pool(map, {queries, one}, {keys, two});
  EXPECT_EQ(pooled.rows, 1);
  EXPECT_EQ(pooled.columns, 2);
  EXPECT_FLOAT_EQ(pooled.at(0, 0), (1 + 2 + 4 + 5) / 2.0);
  EXPECT_FLOAT_EQ(pooled.at(0, 1), (3 + 6) / 2.0);
  EXPECT_TRUE(pooled.is_blocked(0, 0));
  EXPECT_FALSE(pooled.is_blocked(0, 1));
}

TEST(HeatMap, PoolingInStepsIsPoolingAtOnce) {
  const HeatMap map = example(23, 37);
  const Axis queries = make_axis(23, 23), keys = make_axis(37, 37);
  const Axis q1 = coarser(queries, 12), k1 = coarser(keys, 13);
  const Axis q2 = coarser(q1, 4), k2 = coarser(k1, 5);
  const HeatMap steps =
      pool(pool(map, {queries, q1}, {keys, k1}), {q1, q2}, {k1, k2});
  const HeatMap once = pool(map, {queries, q2}, {keys, k2});
  ASSERT_EQ(steps.values.size(), once.values.size());
  for (size_t i = 0; i < once.values.size(); ++i)
    EXPECT_NEAR(steps.values[i], once.values[i], 1e-4);
}

TEST(HeatMap, RowsOfWeightsStillSumToOne) {
  HeatMap map = example(6, 10);
  for (int row = 0; row < 6; ++row) {
    float sum = 0;
    for (int column = 0; column < 10; ++column) sum += map.at(row, column);
    for (int column = 0; column < 10; ++column)
      map.values[row * 10 + column] /= sum;
  }
  const Axis queries = make_axis(6, 6), keys = make_axis(10, 10);
  const HeatMap pooled =
      pool(map, {queries, coarser(queries, 2)}, {keys, coarser(keys, 3)});
  for (int row = 0; row < pooled.rows; ++row) {
    float sum = 0;
    for (int column = 0; column < pooled.columns; ++column)
      sum += pooled.at(row, column);
    EXPECT_NEAR(sum, 1, 1e-6);
  }
}

// ---- Colours ----------------------------------------------------------------

double lightness(Rgb c) { return 0.2 * c.red + 0.7 * c.green + 0.1 * c.blue; }

TEST(Colours, SequentialGrowsLighterAllTheWay) {
  for (int i = 1; i <= 100; ++i)
    EXPECT_GT(lightness(sequential(i / 100.0)),
              lightness(sequential((i - 1) / 100.0)) - 0.5);
  EXPECT_LT(lightness(sequential(0)), 30);
  EXPECT_GT(lightness(sequential(1)), 220);
  EXPECT_EQ(sequential(-3), sequential(0));
  EXPECT_EQ(sequential(kNaN), sequential(0));
  EXPECT_EQ(sequential(7), sequential(1));
}

TEST(Colours, DivergingIsPaleInTheMiddle) {
  EXPECT_GT(lightness(diverging(0)), 235);
  EXPECT_GT(diverging(-1).blue, diverging(-1).red);
  EXPECT_GT(diverging(1).red, diverging(1).blue);
}

TEST(Colours, NearestOf256) {
  EXPECT_EQ(nearest_of_256({0, 0, 0}), 16);
  EXPECT_EQ(nearest_of_256({255, 255, 255}), 231);
  EXPECT_EQ(nearest_of_256({255, 0, 0}), 196);
  EXPECT_EQ(nearest_of_256({128, 128, 128}), 244);
  EXPECT_EQ(hex({1, 171, 255}), "#01abff");
}

TEST(ColourScale, GoesByTheRoot) {
  const ColourScale scale({.low = 0, .high = 0.5});
  EXPECT_FALSE(scale.is_signed());
  EXPECT_DOUBLE_EQ(scale.share(0.125), 0.5);
  EXPECT_DOUBLE_EQ(scale.value(0.5), 0.125);
  EXPECT_EQ(scale(0.5), sequential(1));
  EXPECT_EQ(scale(kNaN), kNotFinite);
  const ColourScale both({.low = -0.4, .high = 0.1});
  EXPECT_TRUE(both.is_signed());
  EXPECT_EQ(both(-0.4), diverging(-1));
  EXPECT_EQ(both(0), diverging(0));
  EXPECT_EQ(ColourScale({})(0), sequential(0));
}

// ---- Lines ------------------------------------------------------------------

Picture picture_of(int heads, int length, std::vector<std::string> tokens) {
  Picture picture{
      .title = "a title that is rather long for small screens",
      .num_heads = heads,
      .num_kv_heads = heads % 2 == 0 ? heads / 2 : heads,
      .stages = {{"scores", "q·kᵀ / √8", {1, heads, length, length}},
                 {"weights", "softmax", {1, heads, length, length}}}};
  Item item{.queries = make_axis(length, 256, tokens),
            .keys = make_axis(length, 256, tokens)};
  const auto cells = item.keys.cells();
  for (int head = -1; head < heads; ++head) {
    Panel panel{.name = "head " + std::to_string(head),
                .map = example(cells, cells),
                .entropy = 1.5,
                .links = {{0, length - 1, 0.75}}};
    panel.map.blocked.back() = 1;
    panel.map.values[0] = kNaN;
    item.panels.push_back(std::move(panel));
  }
  item.remarks = {"something that one should know about these weights"};
  picture.items.push_back(std::move(item));
  return picture;
}

std::string without_codes(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\033')
      while (text[i] != 'm' && text[i] != 'G') ++i;
    else
      plain += text[i];
  return plain;
}

TEST(PictureText, NoLineIsLongerThanTheScreen) {
  const std::vector<std::string> tokens = {"cat",
                                           "日本語",
                                           "שלום",
                                           "👩‍👩‍👧",
                                           "e\u0301",
                                           "\"\"",
                                           "averyverylongtoken"};
  for (const int heads : {1, 4, 64})
    for (const int length : {1, 7, 100, 4096})
      for (const int width : {20, 40, 80, 200})
        for (const Colours colours :
             {Colours::kNone, Colours::k256, Colours::kTrue})
          for (const bool utf8 : {false, true}) {
            const std::string text = to_text(
                picture_of(heads, length,
                           length == 7 ? tokens : std::vector<std::string>()),
                {.width = width, .colours = colours, .utf8 = utf8});
            std::istringstream lines(without_codes(text));
            for (std::string line; std::getline(lines, line);) {
              EXPECT_LE(columns(line), width)
                  << heads << " " << length << " " << utf8 << "\n"
                  << line;
              if (!utf8) {
                EXPECT_TRUE(std::ranges::all_of(line, [](char c) {
                  return c >= 0;
                })) << line;
              }
            }
          }
}

}  // namespace
