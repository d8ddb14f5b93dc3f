// SPDX-License-Identifier: MIT
//
// Random configurations, each on every instruction set, against the float64
// loops run once. MULTIHEAD_LONG=1 tries ten times as many; a configuration is
// known by its number, and MULTIHEAD_FUZZ_FIRST says at which to begin. A long
// run keeps its progress and its result in fuzz_<dtype>.txt in the current
// folder, and goes on there if the same binary is started again.
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <fstream>

#include "tests/cpp/kernels/gradients.h"

namespace kernel_test {
namespace {

/// How far a long run has come.
struct Record {
  std::string file;
  long long binary = 0;  ///< when it was linked
  uint64_t next = 0;
  WorstErrors worst = {};
  WorstGradients gradients = {};

  explicit Record(Dtype dtype)
      : file(std::string("fuzz_") + name_of(dtype) + ".txt") {
    struct stat self{};
    if (stat("/proc/self/exe", &self) == 0) binary = self.st_mtime;
    Record kept;
    std::ifstream in(file);
    in >> kept.binary >> kept.next;
    for (double* x : kept.numbers()) in >> *x;
    if (in && kept.binary == binary) {
      next = kept.next;
      worst = kept.worst;
      gradients = kept.gradients;
    }
  }
  void keep() {
    const std::string part = file + ".part";
    std::ofstream out(part);
    out << binary << ' ' << next;
    for (double* x : numbers()) out << ' ' << *x;
    out << std::endl;
    rename(part.c_str(), file.c_str());
  }

 private:
  Record() = default;
  std::array<double*, 8> numbers() {
    WorstGradients& g = gradients;
    return {&worst.out, &worst.logsumexp, &worst.weights, &g.query,
            &g.key,     &g.value,         &g.bias,        &g.heads};
  }
};

class Fuzz : public testing::TestWithParam<Dtype> {
 protected:
  void try_configuration(uint64_t number) {
    const Call c = random_call(GetParam(), number);
    SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                 description(c));
    const Golden golden(c);
    const bool average = number % 2 == 0;
    std::vector<uint64_t> out_bits, logsumexp_bits;
    std::vector<std::vector<uint64_t>> gradient_bits;
    Rng rng(number);
    const OutputGradients gradients = random_gradients(rng, c);
    for (const Variant& variant : variants(c.dtype)) {
      SCOPED_TRACE(variant.name);
      const Result result =
          forward(variant, c, {.threads = number % 8 == 0 ? 2 : 1});
      judge_forward(c, golden, result, worst_);
      EXPECT_TRUE(result.out.gaps_hold(kUnwritten));
      judge_weights(c, golden, weights(variant, c, result.logsumexp, average),
                    worst_);
      const GradientResult of_inputs = backward(
          variant, c, result, gradients, {.threads = number % 8 == 0 ? 3 : 1});
      judge_backward(c, golden, gradients, of_inputs, worst_gradients_);
      if (!variant.fuses || precision_of(c.dtype).own > 0) continue;
      const auto all = of_inputs.all();
      if (gradient_bits.empty()) {
        for (const auto& [name, x] : all) gradient_bits.push_back(x->bits());
      }
      for (size_t n = 0; n < all.size(); ++n) {
        expect_same_bits(all[n].first, all[n].second->bits(), gradient_bits[n]);
      }
      if (out_bits.empty()) {
        out_bits = result.out.bits();
        logsumexp_bits = result.logsumexp.bits();
      }
      EXPECT_EQ(result.out.bits(), out_bits);
      EXPECT_EQ(result.logsumexp.bits(), logsumexp_bits);
    }
  }

  WorstErrors worst_;
  WorstGradients worst_gradients_;
};

TEST_P(Fuzz, StaysWithinTheErrorBudget) {
  const bool is_long = getenv("MULTIHEAD_LONG") != nullptr;
  const uint64_t count = is_long ? 5000 : 500;
  Record record(GetParam());
  uint64_t n = number_from("MULTIHEAD_FUZZ_FIRST");
  if (is_long && record.next < count) {
    n = std::max(n, record.next);
    worst_ = record.worst;
    worst_gradients_ = record.gradients;
  }
  const uint64_t first = n;
  for (; n < count && !(is_long && HasFailure()); ++n) {
    try_configuration(n);
    if (!is_long || HasFailure() || (n + 1) % 50 != 0) continue;
    record.next = n + 1;
    record.worst = worst_;
    record.gradients = worst_gradients_;
    record.keep();
  }
  printf(
      "  %s: configurations %llu to %llu; worst error, as a share of what is "
      "allowed: out %.2f, logsumexp %.2f, weights %.2f\n",
      name_of(GetParam()), static_cast<unsigned long long>(first),
      static_cast<unsigned long long>(n), worst_.out, worst_.logsumexp,
      worst_.weights);
  const WorstGradients& w = worst_gradients_;
  printf(
      "  gradients: query %.2f, key %.2f, value %.2f, bias %.2f, heads %.2f\n",
      w.query, w.key, w.value, w.bias, w.heads);
}

INSTANTIATE_TEST_SUITE_P(Dtype, Fuzz, testing::ValuesIn(kAllDtypes),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace kernel_test
