// SPDX-License-Identifier: MIT
#include "cli/bench/training.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>

namespace cli {
namespace {

// What the hand-written form may take for its scores; it keeps several.
constexpr int64_t kScoreBytes = int64_t{1} << 25;

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

std::string dropout_fault(const AttentionForm& form, const Task& task,
                          const naive::Precision& p) {
  AttentionInputs ones = task.inputs;
  ones.value = leaf(at::ones_like(ones.value));
  const Outputs sums = step(form, ones, at::ones_like(task.dout));
  const std::string reason = implausible_dropout(sums_of_draws(form, ones));
  if (!reason.empty()) return reason;
  const double unit =
      (p.forward + p.backward_value) * p.unit(task.reference.lambda);
  return implausible_gradient(sums[0].detach(), sums[3], unit);
}

Contender contender(Who who, const AttentionForm& form, Pass pass,
                    const std::shared_ptr<const Task>& task) {
  const naive::Precision precision =
      precision_of(who, task->dout.scalar_type());
  AttentionInputs exact = task->inputs;
  exact.options.dropout_p = 0;
  const auto graph = std::make_shared<Outputs>();
  Contender result{
      .who = who,
      .prepare =
          [=] {
            const at::AutoGradMode with_grad(true);
            if (who == Who::kOurs) expect_fused(task->inputs);
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
      return dropout_fault(form, *task, precision);
    };
  return result;
}

std::vector<Contender> contenders(const AttentionInputs& inputs, Pass pass,
                                  const std::shared_ptr<const Task>& task) {
  const int64_t bytes = inputs.query.numel() / inputs.query.size(-1) *
                        inputs.key.size(2) * inputs.query.element_size();
  const bool by_hand = inputs.options.dropout_p > 0 && bytes <= kScoreBytes;
  std::vector<Contender> all;
  for (const auto& [who, form] : attention_forms(inputs, by_hand))
    all.push_back(contender(who, form, pass, task));
  return all;
}

}  // namespace

Problem training_problem(const AttentionCall& call, Pass pass, Random& random) {
  const AttentionInputs inputs = draw(call, random);
  return {.contenders = contenders(inputs, pass, make_task(inputs, random)),
          .flop = attention_flop(inputs, pass)};
}

Problem training_problem(const LayerCall& call, Pass pass, Random& random) {
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
  Problem problem{.contenders = {}, .flop = layer_flop(*inputs, pass)};
  for (const auto& [who, form] : layer_forms(*inputs)) {
    if (who != Who::kOurs && who != Who::kNnModule) continue;
    const auto run = [=] {
      const at::AutoGradMode with_grad(true);
      return with_gradients(form(*inputs), leaves, dout);
    };
    problem.contenders.push_back(layer_contender(who, run, inputs, reference));
  }
  return problem;
}

Problem training_problem(const BlockCall& call, Random& random) {
  const auto block = std::make_shared<const Block>(draw(call, random));
  AttentionInputs heads;
  forward(*block, [&](const AttentionInputs& x) {
    heads = x;
    return x.value;
  });
  const at::Tensor dout = random.normal(block->input.sizes(), call.dtype);
  Problem problem{
      .contenders = {},
      .flop = attention_flop(heads, Pass::kBoth) +
              linear_flop(call.N * call.L, block->num_weights(), Pass::kBoth)};
  const auto task = make_task(heads, random);
  for (const auto& [who, form] : attention_forms(heads, /*by_hand=*/true)) {
    problem.contenders.push_back(contender(who, form, Pass::kBoth, task));
    problem.contenders.back().timed = [=] {
      const at::AutoGradMode with_grad(true);
      return with_gradients({forward(*block, form)}, block->leaves(), dout);
    };
  }
  return problem;
}

}  // namespace cli
