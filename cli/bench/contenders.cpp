// SPDX-License-Identifier: MIT
#include "cli/bench/contenders.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/bench/roofline.h"
#include "cli/bench/training.h"
#include "cli/cases/golden.h"
#include "cli/cases/pytorch.h"

namespace cli {
namespace {

// What the hand-written form may take for its scores.
constexpr int64_t kScoreBytes = int64_t{1} << 28;
// Of fewer the sample's deviation is no measure: where few were dropped by
// chance, it is small as well.
constexpr int64_t kRowsOfDropout = 4096;

// Copies of the inputs by turns, so many that none is still in a cache.
class Turns {
 public:
  Turns(const AttentionInputs& inputs, bool cold) : sets_{inputs} {
    if (!cold) return;
    int64_t bytes = 0;
    for (const auto& x : {inputs.query, inputs.key, inputs.value})
      bytes += x.nbytes();
    const int64_t copies =
        std::min(2 * last_level_cache(), int64_t{1} << 30) / bytes;
    for (int64_t i = 0; i < copies; ++i)
      sets_.push_back({inputs.query.clone(), inputs.key.clone(),
                       inputs.value.clone(), inputs.options});
  }
  const AttentionInputs& next() {
    turn_ = (turn_ + 1) % sets_.size();
    return sets_[turn_];
  }

 private:
  std::vector<AttentionInputs> sets_;
  size_t turn_ = 0;
};

Contender attention_contender(Who who, const AttentionForm& form,
                              const AttentionInputs& inputs,
                              const std::shared_ptr<Turns>& turns,
                              const std::shared_ptr<Reference>& reference) {
  const naive::Precision precision =
      precision_of(who, inputs.query.scalar_type());
  AttentionInputs exact = inputs, ones = inputs;
  exact.options.dropout_p = 0;
  ones.value = at::ones_like(inputs.value);
  Contender contender{.who = who,
                      .prepare =
                          [=] {
                            if (who == Who::kOurs) expect_fused(inputs);
                          },
                      .timed = [=] { return Outputs{form(turns->next())}; },
                      .verified = [=] { return Outputs{form(exact)}; },
                      .dropout_fault = {},
                      .fault =
                          [=](const Outputs& out) {
                            return fault(out, *reference, precision);
                          }};
  if (inputs.options.dropout_p > 0)
    contender.dropout_fault = [=] {
      return implausible_dropout(sums_of_draws(form, ones));
    };
  return contender;
}

Problem forward_problem(const BenchCase& test, const AttentionCall& call,
                        Random& random) {
  const AttentionInputs inputs = draw(call, random);
  const auto turns = std::make_shared<Turns>(inputs, test.cold);
  const auto reference = std::make_shared<Reference>(reference_of(inputs));
  Problem problem{.contenders = {},
                  .flop = attention_flop(inputs, Pass::kForward)};
  const int64_t element = inputs.query.element_size();
  const bool by_hand =
      call.B * call.H * call.Lq * call.Lk * element <= kScoreBytes;
  for (const auto& [who, form] : attention_forms(inputs, by_hand))
    problem.contenders.push_back(
        attention_contender(who, form, inputs, turns, reference));
  for (const at::Tensor& x : {inputs.query, inputs.key, inputs.value})
    problem.bytes += x.nbytes();
  problem.bytes += reference->parts[0].result.value.numel() * element;
  return problem;
}

Problem forward_problem(const LayerCall& call, Random& random) {
  const auto inputs = std::make_shared<LayerInputs>(draw(call, random));
  const auto reference = std::make_shared<Reference>(reference_of(*inputs));
  Problem problem{.contenders = {},
                  .flop = layer_flop(*inputs, Pass::kForward),
                  .bytes = 2.0 * inputs->query.nbytes()};
  for (const auto& [who, form] : layer_forms(*inputs))
    problem.contenders.push_back(layer_contender(
        who, [form, inputs] { return form(*inputs); }, inputs, reference));
  return problem;
}

}  // namespace

Problem make_problem(const BenchCase& test, Random& random) {
  const bool trains = test.pass != Pass::kForward;
  if (const auto* call = std::get_if<AttentionCall>(&test.call))
    return trains ? training_problem(*call, test.pass, random)
                  : forward_problem(test, *call, random);
  if (const auto* call = std::get_if<LayerCall>(&test.call))
    return trains ? training_problem(*call, test.pass, random)
                  : forward_problem(*call, random);
  return training_problem(std::get<BlockCall>(test.call), random);
}

Contender layer_contender(Who who, const Call& run,
                          const std::shared_ptr<const LayerInputs>& inputs,
                          const std::shared_ptr<const Reference>& reference) {
  return {.who = who,
          .prepare =
              [=] {
                const at::AutoGradMode with_grad(true);
                if (who == Who::kOurs) expect_fused(*inputs);
              },
          .timed = run,
          .verified = run,
          .dropout_fault = {},
          .fault =
              [=](const Outputs& out) {
                return fault(out, *reference,
                             layer_precision(inputs->query.scalar_type()));
              }};
}

double attention_flop(const AttentionInputs& x, Pass pass) {
  const at::Tensor keep = pytorch::keep_mask(x.query, x.key, x.options);
  const double rows = x.query.size(0) * x.query.size(1) * x.query.size(2);
  const double pairs =
      keep.sum().item<double>() * rows * x.key.size(2) / keep.numel();
  const double D = x.query.size(3), Dv = x.value.size(3);
  double flop = 0;
  if (pass != Pass::kBackward) flop += 2 * pairs * (D + Dv);
  if (pass != Pass::kForward) flop += 2 * pairs * (3 * D + 2 * Dv);
  return flop;
}

double layer_flop(const LayerInputs& x, Pass pass) {
  const at::Tensor rows =
      x.layer.batch_first ? x.query : x.query.transpose(0, 1);
  const double E = x.layer.embed_dim;
  AttentionInputs heads;  // for its sizes
  heads.query = heads.key = heads.value =
      rows.unflatten(-1, {x.layer.num_heads, -1}).transpose(1, 2);
  heads.options.is_causal = x.options.is_causal();
  return attention_flop(heads, pass) +
         linear_flop(rows.numel() / E, 4 * E * E, pass);
}

double linear_flop(double rows, double weights, Pass pass) {
  double products = 0;
  if (pass != Pass::kBackward) products += 1;
  if (pass != Pass::kForward) products += 2;
  return 2 * rows * weights * products;
}

naive::Precision precision_of(Who who, at::ScalarType dtype) {
  return who == Who::kOurs ? attention_precision(dtype)
                           : layer_precision(dtype);
}

at::Tensor sums_of_draws(const AttentionForm& form,
                         const AttentionInputs& ones) {
  std::vector<at::Tensor> draws;
  int64_t rows = 0;
  while (rows < kRowsOfDropout) {
    draws.push_back(form(ones).detach());
    rows += draws.back().select(-1, 0).numel();
  }
  return at::cat(draws);
}

std::string implausible_dropout(const at::Tensor& sums) {
  const at::Tensor rows = sums.select(-1, 0).to(at::kDouble);
  const double mean = rows.mean().item<double>();
  const double deviation = rows.std(/*unbiased=*/false).item<double>();
  if (!(deviation > 0)) return "with dropout, nothing was dropped";
  // A 16-bit result adds its own rounding to the mean.
  const double allowed = 6 * deviation / std::sqrt(rows.numel()) +
                         attention_precision(sums.scalar_type()).unit(0);
  if (std::abs(mean - 1) <= allowed) return "";
  return c10::str("with dropout, weights sum to ", mean, " on average");
}

std::string implausible_gradient(const at::Tensor& out,
                                 const at::Tensor& dvalue, double unit) {
  const int64_t G = dvalue.size(1);  // query heads share value heads
  const auto sums = [G](const at::Tensor& x) {
    return x.select(-1, 0).to(at::kDouble).unflatten(1, {G, -1}).sum({2, 3});
  };
  const at::Tensor rows = sums(out), columns = sums(dvalue);
  const double largest = ((rows - columns).abs() / rows).max().item<double>();
  if (largest <= unit) return "";
  return c10::str("with dropout, backward had other weights than forward: ",
                  "sums differ by ", largest);
}

}  // namespace cli
