// SPDX-License-Identifier: MIT
//
// What is written is read back bit by bit, a file's bytes are those of the
// format, and a file is replaced as a whole or not at all.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <thread>

#include "multihead/safetensors.h"
#include "tests/cpp/safetensors/files.h"

namespace multihead {
namespace {

using test::make_file;
using test::TemporaryFolder;
using enum SafetensorsFault;
using namespace std::string_literals;

Safetensors parse(const std::string& bytes) {
  return parse_safetensors(std::as_bytes(std::span(bytes)));
}

/// Bit patterns 0, 1, 2, … of one byte each, as this dtype; bool: 0 and 1.
at::Tensor make_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, dtype);
  auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<uint8_t>(dtype == at::kBool ? i % 2 : 37 * i);
  }
  return tensor;
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(actual.is_contiguous());
  ASSERT_EQ(actual.nbytes(), expected.nbytes());
  const at::Tensor plain = expected.resolve_conj().resolve_neg().contiguous();
  EXPECT_TRUE(actual.nbytes() == 0 ||
              std::memcmp(actual.const_data_ptr(), plain.const_data_ptr(),
                          actual.nbytes()) == 0);
}

void expect_round_trip(const Safetensors& content) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  write_safetensors(path, content);
  const Safetensors copy = read_safetensors(path);
  EXPECT_EQ(copy.metadata, content.metadata);
  ASSERT_EQ(copy.tensors.size(), content.tensors.size());
  for (const auto& [name, tensor] : content.tensors) {
    SCOPED_TRACE(name);
    expect_same(copy.tensors.at(name), tensor);
  }
}

class EveryDtype : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(EveryDtype, RoundTrips) {
  expect_round_trip({.tensors = {
                         {"matrix", make_tensor({3, 5}, GetParam())},
                         {"scalar", make_tensor({}, GetParam())},
                         {"empty", make_tensor({2, 0, 3}, GetParam())},
                         {"high", make_tensor({1, 2, 1, 2, 1, 2}, GetParam())},
                     }});
}

INSTANTIATE_TEST_SUITE_P(
    Safetensors, EveryDtype,
    ::testing::Values(at::kBool, at::kByte, at::kChar, at::kShort, at::kInt,
                      at::kLong, at::kUInt16, at::kUInt32, at::kUInt64,
                      at::kHalf, at::kBFloat16, at::kFloat, at::kDouble,
                      at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                      at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
                      at::kFloat8_e8m0fnu),
    [](const auto& info) { return c10::toString(info.param); });

TEST(SafetensorsRoundTrip, Nothing) { expect_round_trip({}); }

TEST(SafetensorsRoundTrip, MetadataAlone) {
  expect_round_trip({.metadata = {{"format", "pt"}, {"", "\"\\\n\x01\x7F"}}});
}

TEST(SafetensorsRoundTrip, NamesOfAnyText) {
  Safetensors content{.metadata = {{"größe", "注意力 🤗"}}};
  for (const std::string& name :
       {""s, "größe"s, "注意力"s, "🤗"s, "a\"b\\c/d"s, "tab\there"s, "nul\0"s,
        "__metadata"s, "dtype"s, std::string(1000, 'n')}) {
    content.tensors[name] = make_tensor({2}, at::kFloat);
  }
  expect_round_trip(content);
}

TEST(SafetensorsRoundTrip, SixteenMebibytes) {
  expect_round_trip({.tensors = {{"big", at::rand({2048, 2048})}}});
}

TEST(SafetensorsRoundTrip, TenThousandTensors) {
  Safetensors content;
  for (int i = 0; i < 10'000; ++i) {
    content.tensors[std::to_string(i)] = at::full({i % 3}, i);
  }
  expect_round_trip(content);
}

TEST(SafetensorsRoundTrip, AnyStridesAndViews) {
  const at::Tensor base = at::rand({4, 6});
  const at::Tensor complex = at::rand({3, 2}, at::kComplexFloat);
  expect_round_trip({.tensors = {
                         {"transposed", base.t()},
                         {"slice", base.slice(1, 1, 6, 2)},
                         {"expanded", base.select(0, 0).expand({3, 6})},
                         {"flipped", base.flip(0)},
                         {"conj", complex.conj()},
                         {"neg", at::imag(complex.conj())},
                         {"gradient", at::rand({2}).requires_grad_()},
                     }});
}

TEST(SafetensorsFormat, BytesAreThoseOfTheFormat) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  write_safetensors(path,
                    {.tensors = {{"b", at::tensor({1, 2}, at::kByte)},
                                 {"a", at::tensor({3}, at::kByte)},
                                 {"wide", at::tensor({1.0}, at::kDouble)}},
                     .metadata = {{"k", "v"}}});
  const std::string header =
      R"({"__metadata__":{"k":"v"},)"
      R"("wide":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"U8","shape":[1],"data_offsets":[8,9]},)"
      R"("b":{"dtype":"U8","shape":[2],"data_offsets":[9,11]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(test::read_bytes(path),
            make_file(header + padding, "\0\0\0\0\0\0\xF0\x3F\3\1\2"s));
}

TEST(SafetensorsFormat, WhitespaceMayFollowTheHeader) {
  const Safetensors content = parse(make_file(
      "{ \"w\" : {\"dtype\":\"U8\", \"shape\":[2], \"data_offsets\":[0, 2]} }"
      " \t\r\n   ",
      "\1\2"));
  expect_same(content.tensors.at("w"), at::tensor({1, 2}, at::kByte));
}

TEST(SafetensorsFormat, TensorsMayComeInAnyOrder) {
  const std::string header =
      R"({"a":{"data_offsets":[2,3],"dtype":"U8","shape":[1]},)"
      R"("c":{"shape":[0],"dtype":"F64","data_offsets":[2,2]},)"
      R"("b":{"shape":[2],"data_offsets":[0,2],"dtype":"U8"}})";
  const Safetensors content = parse(make_file(header, "\1\2\3"));
  expect_same(content.tensors.at("a"), at::tensor({3}, at::kByte));
  expect_same(content.tensors.at("b"), at::tensor({1, 2}, at::kByte));
  expect_same(content.tensors.at("c"), at::empty({0}, at::kDouble));
}

TEST(SafetensorsWrite, RefusesWhatTheFormatLacks) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  const auto expect = [&](const Safetensors& content, SafetensorsFault fault,
                          const std::string& fragment) {
    test::expect_fault([&] { write_safetensors(path, content); }, fault,
                       {"write_safetensors: " + path + ": ", fragment});
  };
  const at::Tensor one = at::rand({1});
  expect({.tensors = {{"w", one.to(at::kComplexDouble)}}}, kDtype,
         "tensor \"w\": dtype must be one of BOOL,");
  expect({.tensors = {{"w", at::Tensor()}}}, kTensorInfo, "undefined tensor");
  expect({.tensors = {{"w", one.to_sparse()}}}, kTensorInfo, "layout Sparse");
  expect({.tensors = {{"w", one.to(at::kMeta)}}}, kTensorInfo, "meta tensor");
  expect({.tensors = {{"w", at::empty(std::vector<int64_t>(65, 1))}}}, kShape,
         "at most 64 sizes, got 65");
  expect({.tensors = {{"__metadata__", one}}}, kMetadata, "must not be");
  expect({.tensors = {{"\xFF", one}}}, kHeaderUtf8, "must be UTF-8");
  expect({.metadata = {{"k", "\xC3"}}}, kHeaderUtf8, "must be UTF-8");
  expect({.metadata = {{"k", std::string(100'000'000, 'x')}}}, kHeaderTooLarge,
         "at most 100000000, got 100000");
  EXPECT_EQ(folder.file_count(), 0u);
}

TEST(SafetensorsWrite, ReplacesAFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  test::write_bytes(path, "old");
  write_safetensors(path, {.tensors = {{"w", at::ones({2})}}});
  EXPECT_EQ(read_safetensors(path).tensors.size(), 1u);
  EXPECT_EQ(folder.file_count(), 1u);
}

TEST(SafetensorsWrite, TakesARelativePath) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder / "");
  write_safetensors("file.safetensors", {});
  std::filesystem::current_path(before);
  EXPECT_TRUE(read_safetensors(folder / "file.safetensors").tensors.empty());
}

// The limit on file sizes stands in for a full disk: the write fails midway.
TEST(SafetensorsWrite, LeavesTheOldFileWhenTheDiskIsFull) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  test::write_bytes(path, "old");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit;
  getrlimit(RLIMIT_FSIZE, &old_limit);
  const rlimit limit{.rlim_cur = 1000, .rlim_max = old_limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  test::expect_fault(
      [&] { write_safetensors(path, {.tensors = {{"w", at::ones({1000})}}}); },
      kUnreadable, {path + ": file must be writable", "File too large"});
  setrlimit(RLIMIT_FSIZE, &old_limit);
  EXPECT_EQ(test::read_bytes(path), "old");
  EXPECT_EQ(folder.file_count(), 1u);
}

TEST(SafetensorsWrite, LeavesNothingWhereItCannotWrite) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "taken");
  test::write_bytes(folder / "plain", "");
  const auto expect = [](const std::string& path, const std::string& reason) {
    test::expect_fault([&] { write_safetensors(path, {}); }, kUnreadable,
                       {path + ": file must", reason});
  };
  expect(folder / "taken", "Is a directory");
  expect(folder / "none/file", "No such file or directory");
  expect(folder / "plain/file", "Not a directory");
  expect("", "No such file or directory");
  EXPECT_EQ(folder.file_count(), 2u);
}

// Readers see the old file or the new one, never a part.
TEST(SafetensorsWrite, IsAtomicForReaders) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  const auto write = [&](int value) {
    write_safetensors(path, {.tensors = {{"w", at::full({999}, value)}}});
  };
  write(0);
  std::thread writer([&] {
    for (int i = 1; i <= 50; ++i) write(i);
  });
  for (int i = 0; i < 50; ++i) {
    const at::Tensor values = read_safetensors(path).tensors.at("w");
    EXPECT_TRUE(values.eq(values[0]).all().item<bool>());
  }
  writer.join();
  EXPECT_EQ(folder.file_count(), 1u);
}

TEST(SafetensorsRead, NamesWhatCannotBeRead) {
  const TemporaryFolder folder;
  const std::string fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto expect = [](const std::string& path, const std::string& reason) {
    test::expect_fault([&] { read_safetensors(path); }, kUnreadable,
                       {"read_safetensors: " + path, reason});
  };
  expect(folder / "none", "got No such file or directory");
  expect(folder / "", "got Is a directory");
  expect(folder / "loop", "got Too many levels of symbolic links");
  expect(folder / std::string(300, 'n'), "got File name too long");
  expect(fifo, "must be a regular file");
  expect("/dev/zero", "must be a regular file");
}

TEST(SafetensorsRead, NamesAFileWithoutPermission) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  test::write_bytes(path, make_file("{}"));
  std::filesystem::permissions(path, std::filesystem::perms::none);
  // Root may read everything, so it becomes somebody else for the moment.
  constexpr uid_t kNobody = 65534;
  const uid_t user = ::geteuid();
  ASSERT_EQ(::seteuid(user == 0 ? kNobody : user), 0);
  test::expect_fault([&] { read_safetensors(path); }, kUnreadable,
                     {path, "got Permission denied"});
  ASSERT_EQ(::seteuid(user), 0);
}

}  // namespace
}  // namespace multihead
