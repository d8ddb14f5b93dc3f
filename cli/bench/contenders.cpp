// SPDX-License-Identifier: MIT
#include "cli/bench/contenders.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/bench/roofline.h"
#include "cli/cases/golden.h"
#include "cli/cases/pytorch.h"

namespace cli {
namespace {

// What the hand-written form may take for its scores.
constexpr int64_t kScoreBytes = int64_t{1} << 28;
// So many rows at least: if chance drops little in a small sample, the
// deviation of that sample is small as well, and would refuse a correct mean.
constexpr int64_t kRowsOfDropout = 4096;

// Copies of the inputs by turns, so many that none is still in a cache.
class InputRotation {
 public:
  InputRotation(const AttentionInputs& inputs, bool cold) : sets_{inputs} {
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

Contender attention_contender(Implementation who, const AttentionForm& form,
                              const AttentionInputs& inputs,
                              const std::shared_ptr<InputRotation>& rotation,
                              const std::shared_ptr<Reference>& reference) {
  const reference::Precision precision =
      precision_of(who, inputs.query.scalar_type());
  AttentionInputs exact = inputs, ones = inputs;
  exact.options.dropout_p = 0;
  ones.value = at::ones_like(inputs.value);
  Contender contender{.who = who,
                      .prepare =
                          [=] {
                            if (who == Implementation::kOurs)
                              expect_fused(inputs);
                          },
                      .timed = [=] { return Outputs{form(rotation->next())}; },
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

// A layer, judged as it is timed: `run` returns what the reference demands.
Contender layer_contender(Implementation who, const Call& run,
                          const std::shared_ptr<const LayerInputs>& inputs,
                          const std::shared_ptr<const Reference>& reference) {
  return {.who = who,
          .prepare =
              [=] {
                const at::AutoGradMode with_grad(true);
                if (who == Implementation::kOurs) expect_fused(*inputs);
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

PreparedCase prepare_forward(const BenchCase& test, const AttentionCall& call,
                             Random& random) {
  const AttentionInputs inputs = draw(call, random);
  const auto rotation = std::make_shared<InputRotation>(inputs, test.cold);
  const auto reference = std::make_shared<Reference>(reference_of(inputs));
  PreparedCase prepared{.contenders = {},
                        .flop = attention_flop(inputs, Pass::kForward)};
  const int64_t element = inputs.query.element_size();
  const bool by_hand =
      call.B * call.H * call.Lq * call.Lk * element <= kScoreBytes;
  for (const auto& [who, form] : attention_forms(inputs, by_hand))
    prepared.contenders.push_back(
        attention_contender(who, form, inputs, rotation, reference));
  for (const at::Tensor& x : {inputs.query, inputs.key, inputs.value})
    prepared.bytes += x.nbytes();
  prepared.bytes += reference->parts[0].result.value.numel() * element;
  return prepared;
}

PreparedCase prepare_forward(const LayerCall& call, Random& random) {
  const auto inputs = std::make_shared<LayerInputs>(draw(call, random));
  const auto reference = std::make_shared<Reference>(reference_of(*inputs));
  PreparedCase prepared{.contenders = {},
                        .flop = layer_flop(*inputs, Pass::kForward),
                        .bytes = 2.0 * inputs->query.nbytes()};
  for (const auto& [who, form] : layer_forms(*inputs))
    prepared.contenders.push_back(layer_contender(
        who, [form, inputs] { return form(*inputs); }, inputs, reference));
  return prepared;
}

// --- With a backward pass
// ------------------------------------------------------

// The same in training, which keeps several.
constexpr int64_t kTrainingScoreBytes = int64_t{1} << 25;

// `results`, and after them the gradients of Σ results[0]·dout.
Outputs with_gradients(Outputs results, const std::vector<at::Tensor>& leaves,
                       const at::Tensor& dout, bool keep_graph = false) {
  const auto gradients =
      torch::autograd::grad({results[0]}, leaves, {dout}, keep_graph);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

// The inputs of one case, and what shall come of them.
struct Task {
  AttentionInputs inputs;  // leaves
  at::Tensor dout;
  Reference reference;
};

std::shared_ptr<Task> make_task(const AttentionInputs& inputs, Random& random) {
  auto sizes = inputs.query.sizes().vec();
  sizes.back() = inputs.value.size(-1);
  const at::Tensor dout = random.normal(sizes, inputs.query.scalar_type());
  return std::make_shared<Task>(
      Task{leaves(inputs), dout, reference_of(inputs, dout)});
}

// (out, d query, d key, d value)
Outputs step(const AttentionForm& form, const AttentionInputs& x,
             const at::Tensor& dout) {
  const at::AutoGradMode with_grad(true);
  return with_gradients({form(x)}, {x.query, x.key, x.value}, dout);
}

std::string training_dropout_fault(const AttentionForm& form, const Task& task,
                                   const reference::Precision& p) {
  AttentionInputs ones = task.inputs;
  ones.value = leaf(at::ones_like(ones.value));
  const Outputs sums = step(form, ones, at::ones_like(task.dout));
  const std::string reason = implausible_dropout(sums_of_draws(form, ones));
  if (!reason.empty()) return reason;
  const double unit =
      (p.forward + p.backward_value) * p.unit(task.reference.lambda);
  return implausible_gradient(sums[0].detach(), sums[3], unit);
}

Contender training_contender(Implementation who, const AttentionForm& form,
                             Pass pass,
                             const std::shared_ptr<const Task>& task) {
  const reference::Precision precision =
      precision_of(who, task->dout.scalar_type());
  AttentionInputs exact = task->inputs;
  exact.options.dropout_p = 0;
  const auto graph = std::make_shared<Outputs>();
  Contender result{
      .who = who,
      .prepare =
          [=] {
            const at::AutoGradMode with_grad(true);
            if (who == Implementation::kOurs) expect_fused(task->inputs);
            if (pass == Pass::kBackward) *graph = {form(task->inputs)};
          },
      .timed = [=] { return step(form, task->inputs, task->dout); },
      .verified = [=] { return step(form, exact, task->dout); },
      .dropout_fault = {},
      .fault =
          [=](const Outputs& out) {
            return fault(out, task->reference, precision);
          }};
  if (pass == Pass::kBackward)
    result.timed = [=] {
      const auto& [query, key, value, options] = task->inputs;
      return with_gradients(*graph, {query, key, value}, task->dout,
                            /*keep_graph=*/true);
    };
  if (task->inputs.options.dropout_p > 0)
    result.dropout_fault = [=] {
      return training_dropout_fault(form, *task, precision);
    };
  return result;
}

std::vector<Contender> training_contenders(
    const AttentionInputs& inputs, Pass pass,
    const std::shared_ptr<const Task>& task) {
  const int64_t bytes = inputs.query.numel() / inputs.query.size(-1) *
                        inputs.key.size(2) * inputs.query.element_size();
  const bool by_hand =
      inputs.options.dropout_p > 0 && bytes <= kTrainingScoreBytes;
  std::vector<Contender> all;
  for (const auto& [who, form] : attention_forms(inputs, by_hand))
    all.push_back(training_contender(who, form, pass, task));
  return all;
}

// Gradients are those of Σ out·dout with dout drawn at random, of query, key
// and value. By hand only with dropout, which PyTorch has no kernel for.
PreparedCase prepare_training(const AttentionCall& call, Pass pass,
                              Random& random) {
  const AttentionInputs inputs = draw(call, random);
  return {.contenders =
              training_contenders(inputs, pass, make_task(inputs, random)),
          .flop = attention_flop(inputs, pass)};
}

// Self-attention in training mode; gradients of the input and all parameters.
// Ours and nn.MHA.
PreparedCase prepare_training(const LayerCall& call, Pass pass,
                              Random& random) {
  LayerInputs drawn = draw(call, random);
  drawn.layer.training = true;
  const auto inputs = std::make_shared<const LayerInputs>(leaves(drawn));
  const at::Tensor dout = random.normal(drawn.query.sizes(), call.dtype);
  const auto reference =
      std::make_shared<const Reference>(reference_of(drawn, dout));
  const multihead::AttentionLayer& layer = inputs->layer;
  const std::vector<at::Tensor> leaves{
      inputs->query, layer.in_proj_weight, layer.in_proj_bias,
      layer.out_proj_weight, layer.out_proj_bias};
  PreparedCase prepared{.contenders = {}, .flop = layer_flop(*inputs, pass)};
  for (const auto& [who, form] : layer_forms(*inputs)) {
    if (who != Implementation::kOurs && who != Implementation::kNnModule)
      continue;
    const auto run = [=] {
      const at::AutoGradMode with_grad(true);
      return with_gradients(form(*inputs), leaves, dout);
    };
    prepared.contenders.push_back(layer_contender(who, run, inputs, reference));
  }
  return prepared;
}

// One step through a block with dropout. Contenders differ in its attention,
// which is what is verified, on the heads that the block makes.
PreparedCase prepare_training(const BlockCall& call, Random& random) {
  const auto block = std::make_shared<const Block>(draw(call, random));
  AttentionInputs heads;
  forward(*block, [&](const AttentionInputs& x) {
    heads = x;
    return x.value;
  });
  const at::Tensor dout = random.normal(block->input.sizes(), call.dtype);
  PreparedCase prepared{
      .contenders = {},
      .flop = attention_flop(heads, Pass::kBoth) +
              linear_flop(call.N * call.L, block->num_weights(), Pass::kBoth)};
  const auto task = make_task(heads, random);
  for (const auto& [who, form] : attention_forms(heads, /*by_hand=*/true)) {
    prepared.contenders.push_back(
        training_contender(who, form, Pass::kBoth, task));
    prepared.contenders.back().timed = [=] {
      const at::AutoGradMode with_grad(true);
      return with_gradients({forward(*block, form)}, block->leaves(), dout);
    };
  }
  return prepared;
}

}  // namespace

PreparedCase prepare_case(const BenchCase& test, Random& random) {
  const bool trains = test.pass != Pass::kForward;
  if (const auto* call = std::get_if<AttentionCall>(&test.call))
    return trains ? prepare_training(*call, test.pass, random)
                  : prepare_forward(test, *call, random);
  if (const auto* call = std::get_if<LayerCall>(&test.call))
    return trains ? prepare_training(*call, test.pass, random)
                  : prepare_forward(*call, random);
  return prepare_training(std::get<BlockCall>(test.call), random);
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

reference::Precision precision_of(Implementation who, at::ScalarType dtype) {
  return who == Implementation::kOurs ? attention_precision(dtype)
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
