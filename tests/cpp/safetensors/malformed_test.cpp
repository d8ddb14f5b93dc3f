// SPDX-License-Identifier: MIT
//
// Files that break one rule of the safetensors format each. All are refused
// with the fault that names the rule, from memory and from disk.
#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "multihead/safetensors.h"
#include "tests/cpp/safetensors/files.h"

namespace multihead {
namespace {

using test::length_field;
using test::make_file;
using enum SafetensorsFault;
using namespace std::string_literals;

struct Malformed {
  std::string name;
  std::string bytes;
  SafetensorsFault fault;
  std::string fragment;  ///< of the message
};

void PrintTo(const Malformed& file, std::ostream* out) { *out << file.name; }

/// {"w": {...}} with the given fields, and `size` bytes of data.
std::string with_entry(const std::string& fields, size_t size = 0) {
  return make_file(R"({"w":{)" + fields + "}}", size);
}

/// The same with the given values, as JSON.
std::string with_values(const std::string& dtype, const std::string& shape,
                        const std::string& offsets, size_t size = 0) {
  return with_entry(R"("dtype":)" + dtype + R"(,"shape":)" + shape +
                        R"(,"data_offsets":)" + offsets,
                    size);
}

std::string with_shape(const std::string& shape) {
  return with_values(R"("U8")", shape, "[0,1]", 1);
}

std::string with_offsets(const std::string& offsets, size_t size = 4) {
  return with_values(R"("F32")", "[1]", offsets, size);
}

/// Tensors a and b of four bytes each, at the given offsets.
std::string with_pair(const std::string& a, const std::string& b, size_t size) {
  const std::string start = R"({"dtype":"F32","shape":[1],"data_offsets":)";
  return make_file(R"({"a":)" + start + a + R"(},"b":)" + start + b + "}}",
                   size);
}

std::string repeat(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

const std::string kScalar = R"({"dtype":"U8","shape":[],"data_offsets":[0,1]})";

std::vector<Malformed> frames() {
  return {
      {"EmptyFile", "", kHeaderTooSmall, "at least 8 bytes, got 0"},
      {"SevenBytes", "\2\0\0\0\0\0\0"s, kHeaderTooSmall, "got 7"},
      {"LengthAboveLimit", length_field(100'000'001) + "{}", kHeaderTooLarge,
       "at most 100000000, got 100000001"},
      {"LengthAllOnes", length_field(~0ULL) + "{}", kHeaderTooLarge,
       "got 18446744073709551615"},
      {"LengthAtLimitInShortFile", length_field(100'000'000) + "{}",
       kHeaderLength, "the 2 bytes that follow it, got 100000000"},
      {"LengthOneTooLong", length_field(3) + "{}", kHeaderLength, "got 3"},
      {"LengthAlone", length_field(60), kHeaderLength, "the 0 bytes"},
      {"NoHeader", length_field(0), kHeaderStart, "got no header"},
      {"LeadingSpace", make_file(" {}"), kHeaderStart, R"(got " ")"},
      {"LeadingNewline", make_file("\n{}"), kHeaderStart, R"(got "\n")"},
      {"ByteOrderMark", make_file("\xEF\xBB\xBF{}"), kHeaderStart, "'{'"},
      {"TopLevelArray", make_file("[]"), kHeaderStart, R"(got "[")"},
      {"TopLevelString", make_file("\"{}\""), kHeaderStart, R"(got "\"")"},
      {"PickleFile", make_file("\x80\x04."), kHeaderStart, "'{'"},
      {"ZipFile", "PK\3\4\24\0\0\0\10\0"s, kHeaderTooLarge,
       "file must be a safetensors file, got a ZIP archive, as torch.save and "
       "numpy.savez write"},
      {"NumPyFile", "\x93NUMPY\1\0v\0"s, kHeaderTooLarge,
       "got an array of numpy.save"},
      {"OldPickleFile", "\x80\2\x8a\nl\xfc\x9c\x46", kHeaderTooLarge,
       "got a pickle"},
      {"TextFile", "Dear reader,\nthis is no dump.\n", kHeaderTooLarge,
       "file must be a safetensors file, got text"},
      {"JsonFile", "{\"x\": [1, 2]}", kHeaderTooLarge, "got text"},
      {"Utf8Text", "\xC3\x84hnlich ist nicht gleich", kHeaderTooLarge,
       "got text"},
      {"ShortText", "note\n", kHeaderTooSmall, "got text"},
  };
}

std::vector<Malformed> encodings() {
  const auto name = [](const std::string& bytes) {
    return make_file("{\"" + bytes + "\":" + kScalar + "}", 1);
  };
  return {
      {"LoneContinuation", name("\x80"), kHeaderUtf8, "invalid byte at 2"},
      {"OverlongTwoBytes", name("\xC0\xAF"), kHeaderUtf8, "at 2"},
      {"OverlongThreeBytes", name("a\xE0\x80\xAF"), kHeaderUtf8, "at 3"},
      {"OverlongFourBytes", name("\xF0\x80\x80\xAF"), kHeaderUtf8, "at 2"},
      {"EncodedSurrogate", name("\xED\xA0\x80"), kHeaderUtf8, "at 2"},
      {"AboveUnicode", name("\xF4\x90\x80\x80"), kHeaderUtf8, "at 2"},
      {"InvalidLead", name("\xFF"), kHeaderUtf8, "at 2"},
      {"InterruptedSequence", name("\xE2\x82"), kHeaderUtf8, "at 2"},
      {"SequenceCutByTheEnd", make_file("{\"\xE2\x82"), kHeaderUtf8, "at 2"},
      {"Utf16", make_file("{\0}\0"s), kHeaderJson, "NUL at byte 1"},
  };
}

std::vector<Malformed> json_texts() {
  const std::string entry = "\"w\":" + kScalar;
  return {
      {"OpenBrace", make_file("{"), kHeaderJson, "error at byte"},
      {"CutInName", make_file("{\"w"), kHeaderJson, "error at byte"},
      {"CutInEntry", make_file("{\"w\":{"), kHeaderJson, "error at byte"},
      {"NameAlone", make_file("{\"w\"}"), kHeaderJson, "error at byte"},
      {"NameNotQuoted", make_file("{w:1}"), kHeaderJson, "error at byte"},
      {"SingleQuotes", make_file("{'w':1}"), kHeaderJson, "error at byte"},
      {"TrailingComma", make_file("{" + entry + ",}", 1), kHeaderJson, "byte"},
      {"NoComma", make_file("{" + entry + " \"v\":1}", 1), kHeaderJson, "byte"},
      {"Comment", make_file("{/**/}"), kHeaderJson, "error at byte"},
      {"TextAfterObject", make_file("{} x"), kHeaderJson, "error at byte"},
      {"TwoObjects", make_file("{}{}"), kHeaderJson, "error at byte"},
      {"NulPadding", make_file("{}\0\0\0\0\0\0"s), kHeaderJson,
       "NUL at byte 2"},
      {"TextAfterNul", make_file("{}\0}"s), kHeaderJson, "NUL at byte 2"},
      {"NanToken", make_file("{\"w\":NaN}"), kHeaderJson, "error at byte"},
      {"HugeNumber", with_shape("[1e999]"), kHeaderJson, "error at byte"},
      {"LeadingZero", with_shape("[01]"), kHeaderJson, "error at byte"},
      {"PlusSign", with_shape("[+1]"), kHeaderJson, "error at byte"},
      {"LoneSurrogate", make_file(R"({"\ud800":1})"), kHeaderJson, "at byte"},
      {"RawNewline", make_file("{\"\n\":1}"), kHeaderJson, "error at byte"},
      {"SameTensorTwice", make_file("{" + entry + "," + entry + "}", 1),
       kHeaderJson, R"(must not repeat a key, got "w" twice)"},
      {"SameTensorEscaped",
       make_file("{" + entry + R"(,"\u0077":)" + kScalar + "}", 1), kHeaderJson,
       R"(got "w" twice)"},
      {"SameFieldTwice", with_entry(R"("shape":[],"shape":[])"), kHeaderJson,
       R"(got "shape" twice in tensor "w")"},
      {"MetadataTwice", make_file(R"({"__metadata__":{},"__metadata__":{}})"),
       kHeaderJson, R"(got "__metadata__" twice)"},
      {"MetadataKeyTwice", make_file(R"({"__metadata__":{"a":"","a":""}})"),
       kHeaderJson, R"(got "a" twice)"},
  };
}

std::vector<Malformed> metadata() {
  const auto file = [](const std::string& value) {
    return make_file("{\"__metadata__\":" + value + "}");
  };
  return {
      {"MetadataNull", file("null"), kMetadata, "must be an object, got null"},
      {"MetadataString", file(R"("pt")"), kMetadata, R"(object, got "pt")"},
      {"MetadataArray", file("[]"), kMetadata, "object, got an array"},
      {"MetadataNumber", file(R"({"a":1})"), kMetadata,
       R"("a" must be a string, got 1)"},
      {"MetadataNullValue", file(R"({"a":null})"), kMetadata, "got null"},
      {"MetadataObjectValue", file(R"({"a":{}})"), kMetadata, "got an object"},
      {"MetadataIsTensor", file(kScalar), kMetadata, "must be a string, got"},
  };
}

std::vector<Malformed> entries() {
  const auto entry = [](const std::string& value) {
    return make_file("{\"w\":" + value + "}");
  };
  const std::string deep = repeat("[", 1'000'000);
  const std::string nested = repeat("{\"w\":", 100'000);
  return {
      {"EntryNull", entry("null"), kTensorInfo, "object, got null"},
      {"EntryNumber", entry("1"), kTensorInfo,
       R"("w" must be an object, got 1)"},
      {"EntryString", entry(R"("F32")"), kTensorInfo, R"(got "F32")"},
      {"EntryArray", entry("[]"), kTensorInfo, "got an array"},
      {"EntryEmpty", entry("{}"), kTensorInfo, "got 0 of them"},
      {"NoDtype", with_entry(R"("shape":[],"data_offsets":[0,0])"), kTensorInfo,
       "got 2 of them"},
      {"NoShape", with_entry(R"("dtype":"U8","data_offsets":[0,0])"),
       kTensorInfo, "must have dtype, shape and data_offsets"},
      {"NoOffsets", with_entry(R"("dtype":"U8","shape":[])"), kTensorInfo,
       "got 2 of them"},
      {"UnknownField", with_entry(R"("device":"cpu")"), kTensorInfo,
       R"(got "device")"},
      {"DeepArrays", entry(deep), kTensorInfo, "got an array"},
      {"DeepShape", with_shape(deep), kShape, "got an array"},
      {"DeepObjects", make_file(nested), kTensorInfo, R"(got "w")"},
      {"DtypeUnknown", with_values(R"("F99")", "[]", "[0,1]", 1), kDtype,
       R"(BF16, I32, U32, F32, C64, F64, I64, U64, got "F99")"},
      {"DtypeLowerCase", with_values(R"("f32")", "[1]", "[0,4]", 4), kDtype,
       R"(tensor "w": dtype must be one of BOOL, U8)"},
      {"DtypeBelowOneByte", with_values(R"("F4")", "[2]", "[0,1]", 1), kDtype,
       R"(got "F4")"},
      {"DtypeNull", with_values("null", "[]", "[0,1]", 1), kDtype, "got null"},
      {"DtypeArray", with_values("[]", "[]", "[0,1]", 1), kDtype, "an array"},
  };
}

std::vector<Malformed> shapes() {
  const std::string many = "[1" + repeat(",1", 64) + "]";
  const auto empty = [](const std::string& shape) {
    return with_values(R"("F32")", shape, "[0,0]");
  };
  return {
      {"ShapeNumber", with_shape("1"), kShape, "must be an array"},
      {"ShapeNull", with_shape("null"), kShape, "got null"},
      {"ShapeObject", with_shape("{}"), kShape, "got an object"},
      {"ShapeNested", with_shape("[[1]]"), kShape, "got an array"},
      {"SizeNegative", with_shape("[-1]"), kShape, "[0, 2^63), got -1"},
      {"SizeMinusZero", with_shape("[-0]"), kShape, "integers in [0, 2^63)"},
      {"SizeFloat", with_shape("[1.0]"), kShape, "got 1.0"},
      {"SizeExponent", with_shape("[1e0]"), kShape, "got 1e0"},
      {"SizeBool", with_shape("[true]"), kShape, "got true"},
      {"SizeString", with_shape(R"(["1"])"), kShape, R"(got "1")"},
      {"SizeNull", with_shape("[null]"), kShape, "got null"},
      {"SizeTwoTo63", with_shape("[9223372036854775808]"), kShape,
       "got 9223372036854775808"},
      {"SizeTwoTo64", with_shape("[18446744073709551616]"), kShape,
       "got 18446744073709551616"},
      {"TooManySizes", with_shape(many), kShape, "at most 64 integers"},
      {"ProductOverflows", empty("[4294967296,4294967296]"), kOverflow,
       "fewer than 2^63 bytes, got [4294967296,4294967296]"},
      {"ProductWrapsToZero", empty("[4611686018427387904,16]"), kOverflow,
       R"(tensor "w": shape must have)"},
      {"WidthOverflows", empty("[2305843009213693952]"), kOverflow, "2^63"},
      {"OverflowBesideZero", empty("[0,4611686018427387904,4]"), kOverflow,
       "got [0,4611686018427387904,4]"},
  };
}

std::vector<Malformed> offsets() {
  const std::string four =
      R"({"dtype":"F32","shape":[2,2],"data_offsets":[0,16]})";
  std::string same = "{\"w0\":" + four;
  for (int i = 1; i < 10; ++i) {
    same += ",\"w" + std::to_string(i) + "\":" + four;
  }
  return {
      {"OffsetsNumber", with_offsets("4"), kOffsets, "array of two"},
      {"OffsetsEmpty", with_offsets("[]"), kOffsets, "got 0 of them"},
      {"OffsetsOne", with_offsets("[4]"), kOffsets, "got 1 of them"},
      {"OffsetsThree", with_offsets("[0,4,8]"), kOffsets, "got 8"},
      {"OffsetNegative", with_offsets("[-4,0]"), kOffsets, "got -4"},
      {"OffsetFloat", with_offsets("[0,4.0]"), kOffsets, "got 4.0"},
      {"OffsetString", with_offsets(R"([0,"4"])"), kOffsets, R"(got "4")"},
      {"OffsetTwoTo64", with_offsets("[0,18446744073709551616]"), kOffsets,
       "unsigned integers, got 18446744073709551616"},
      {"Descending", with_offsets("[4,0]"), kOffsets,
       R"("w": data_offsets must not descend, got [4, 0])"},
      {"DescendingFromTheTop", with_offsets("[18446744073709551615,3]"),
       kOffsets, "must not descend"},
      {"HoleAtTheStart", with_offsets("[4,8]", 8), kOffsets,
       "must begin at 0, where the tensor before it ends, got [4, 8]"},
      {"HoleBetween", with_pair("[0,4]", "[8,12]", 12), kOffsets,
       R"("b": data_offsets must begin at 4)"},
      {"Overlap", with_pair("[0,4]", "[2,6]", 6), kOffsets, "begin at 4"},
      {"SameRange", make_file(same + "}", 16), kOffsets,
       "must begin at 16, where the tensor before it ends, got [0, 16]"},
      {"EmptyInsideAnother",
       make_file(R"({"a":)" + four +
                     R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}})",
                 16),
       kOffsets, "begin at 16"},
      {"DataCutShort", with_offsets("[0,4]", 3), kOffsets,
       "must end within the data's 3 bytes, got [0, 4]"},
      {"DataMissing", with_offsets("[0,4]", 0), kOffsets, "the data's 0 bytes"},
      {"EndAtTheTop", with_offsets("[0,18446744073709551615]"), kOffsets,
       "must end within"},
      {"RangeTooShort", with_values(R"("F32")", "[2]", "[0,4]", 4), kSize,
       "must span 8 bytes for shape [2], got [0, 4]"},
      {"RangeTooLong", with_values(R"("F32")", "[1]", "[0,8]", 8), kSize,
       "must span 4 bytes"},
      {"RangeOfEmpty", with_values(R"("F32")", "[0]", "[0,4]", 4), kSize,
       "must span 0 bytes for shape [0]"},
      {"RangeOfScalar", with_values(R"("F64")", "[]", "[0,0]"), kSize,
       "must span 8 bytes for shape []"},
      {"TrailingByte", with_offsets("[0,4]", 5), kTrailing,
       "must end with the last tensor at 4, got 5 bytes"},
      {"DataWithoutTensors", make_file("{}", "polyglot"), kTrailing, "at 0"},
      {"BoolTwo",
       make_file(R"({"w":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})",
                 "\0\1\2"s),
       kValue, R"(tensor "w": BOOL must be 0 or 1, got 2 at 2)"},
  };
}

std::vector<Malformed> all_files() {
  std::vector<Malformed> all;
  for (const auto& group : {frames(), encodings(), json_texts(), metadata(),
                            entries(), shapes(), offsets()}) {
    all.insert(all.end(), group.begin(), group.end());
  }
  return all;
}

class MalformedFile : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedFile, IsRefused) {
  const Malformed& file = GetParam();
  test::expect_fault(
      [&] { parse_safetensors(std::as_bytes(std::span(file.bytes))); },
      file.fault, {"parse_safetensors: memory: ", file.fragment});

  const test::TemporaryFolder folder;
  const std::string path = folder / "malformed.safetensors";
  test::write_bytes(path, file.bytes);
  test::expect_fault([&] { read_safetensors(path); }, file.fault,
                     {"read_safetensors: " + path + ": ", file.fragment});
}

INSTANTIATE_TEST_SUITE_P(Safetensors, MalformedFile,
                         ::testing::ValuesIn(all_files()),
                         [](const auto& info) { return info.param.name; });

// A name from the file neither floods the message nor reaches a terminal raw.
TEST(SafetensorsMessage, CutsAndEscapesNames) {
  const std::string name = "\\u001b[2J" + std::string(10'000, 'x');
  const std::string bytes = make_file("{\"" + name + "\":1}");
  try {
    parse_safetensors(std::as_bytes(std::span(bytes)));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const SafetensorsError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("\"\\u001b[2Jxxx"), std::string::npos) << what;
    EXPECT_LT(what.size(), 250u);
  }
}

}  // namespace
}  // namespace multihead
