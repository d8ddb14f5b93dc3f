// SPDX-License-Identifier: MIT
#include "cli/bench/contenders.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/bench/sequences.h"
#include "cli/bench/timing.h"
#include "cli/cases/answers.h"
#include "cli/cases/golden.h"

namespace cli {
namespace {

using enum Implementation;

// --- Forms of attention, and of layers ---------------------------------------

using AttentionForm = std::function<at::Tensor(const AttentionInputs&)>;

bool needs_mask_tensor(const AttentionOptions& options) {
  return options.window || options.key_lengths.defined() ||
         options.query_offset.defined() || options.key_mask.defined() ||
         options.causal_alignment != multihead::CausalAlignment::kTopLeft;
}

// PyTorch's function, with the mask that stands for the rules it lacks.
AttentionForm sdpa(const AttentionInputs& inputs) {
  AttentionOptions options = inputs.options;
  if (needs_mask_tensor(options)) {
    options = {.attn_mask = pytorch::keep_mask(inputs),
               .dropout_p = options.dropout_p,
               .scale = options.scale,
               .enable_gqa = options.enable_gqa};
  }
  return [options](const AttentionInputs& x) {
    AttentionInputs given{x.query, x.key, x.value, options};
    given.options.dropout_p = x.options.dropout_p;
    return pytorch::attention(given);
  };
}

// softmax(scale·q·kᵀ + bias)·v as people write it; blocked and bias may be
// undefined.
at::Tensor attend_by_hand(const AttentionInputs& x, const at::Tensor& blocked,
                          const at::Tensor& bias = {},
                          at::Tensor* weights = nullptr) {
  const int64_t group = x.query.size(1) / x.key.size(1);
  const auto expanded = [&](const at::Tensor& heads) {
    return group == 1 ? heads : heads.repeat_interleave(group, 1);
  };
  const double scale = 1 / std::sqrt(x.query.size(3));
  at::Tensor scores =
      at::matmul(x.query, expanded(x.key).transpose(-2, -1)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (blocked.defined())
    scores = scores.masked_fill(blocked, -reference::kInfinity);
  at::Tensor w = scores.softmax(-1);
  if (x.options.dropout_p > 0)
    w = at::dropout(w, x.options.dropout_p, /*train=*/true);
  if (weights) *weights = w;
  return at::matmul(w, expanded(x.value));
}

AttentionForm attention_by_hand(const AttentionInputs& inputs) {
  const at::Tensor keep = pytorch::keep_mask(inputs);
  at::Tensor blocked, bias;
  if (!keep.all().item<bool>()) blocked = keep.logical_not();
  if (pytorch::has_bias(inputs.options)) bias = inputs.options.attn_mask;
  return [blocked, bias](const AttentionInputs& x) {
    return attend_by_hand(x, blocked, bias);
  };
}

// Ours first, then PyTorch's function, then attention by hand if asked for.
// Inputs may be others later, of the same sizes and rules; dropout_p is theirs.
std::vector<std::pair<Implementation, AttentionForm>> attention_forms(
    const AttentionInputs& inputs, bool by_hand) {
  std::vector<std::pair<Implementation, AttentionForm>> forms = {
      {kOurs, ours::attention}, {kSdpa, sdpa(inputs)}};
  if (by_hand) forms.emplace_back(kByHand, attention_by_hand(inputs));
  return forms;
}

// Query by query, each with the keys that the last rows of a causal call have.
at::Tensor one_by_one(const AttentionInputs& x) {
  const int64_t Lq = x.query.size(2), past = x.key.size(2) - Lq;
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < Lq; ++i)
    rows.push_back(ours::attention(
        {x.query.narrow(2, i, 1), x.key.narrow(2, 0, past + i + 1),
         x.value.narrow(2, 0, past + i + 1), x.options}));
  return at::cat(rows, 2);
}

// Four linear layers and attention between them. Self-attention, batch first.
Answer layer_by_hand(const LayerInputs& x) {
  const AttentionLayer& layer = x.layer;
  const at::Tensor packed =
      at::linear(x.query, layer.in_proj_weight, layer.in_proj_bias)
          .unflatten(-1, {3, layer.num_heads, -1})
          .permute({2, 0, 3, 1, 4});
  at::Tensor weights;
  const at::Tensor out = attend_by_hand({packed[0], packed[1], packed[2]},
                                        x.options.attn_mask(), {}, &weights);
  return {at::linear(out.transpose(1, 2).flatten(2), layer.out_proj_weight,
                     layer.out_proj_bias),
          x.options.need_weights() ? weights.mean(1) : at::Tensor()};
}

// Output and weights, if there are any.
Call call_of(const LayerForm& form, const LayerInputs& x) {
  return [=] {
    auto [out, weights] = form(x);
    return weights.defined() ? Outputs{out, weights} : Outputs{out};
  };
}

std::vector<std::pair<Implementation, Call>> layer_forms(
    const LayerInputs& inputs) {
  LayerInputs ordinary = inputs, additive = inputs;
  ordinary.options.fast_path(false);
  additive.options.attn_mask(pytorch::additive(inputs.options.attn_mask(),
                                               inputs.query.scalar_type()));
  const LayerForm module = ours::make_module(inputs.layer);
  std::vector<std::pair<Implementation, Call>> forms = {
      {kOurs, call_of(module, inputs)},
      {kNnModule,
       [exact = call_of(module, ordinary)] {
         const BackendGuard guard(Backend::kExact);
         return exact();
       }},
      {kTorchNn, call_of(pytorch::make_nn_module(inputs.layer), additive)},
  };
  if (!inputs.layer.batch_first) return forms;
  forms.emplace_back(kFastPath, call_of(pytorch::native, inputs));
  forms.emplace_back(kByHand, call_of(layer_by_hand, inputs));
  // SDPA takes a mask or the word causal, and returns no weights.
  if (inputs.options.need_weights()) return forms;
  if (inputs.options.is_causal()) ordinary.options.attn_mask({});
  forms.emplace_back(kSdpaByHand, call_of(pytorch::python_module, ordinary));
  return forms;
}

void check_fused(const multihead::Route& route) {
  TORCH_CHECK(route.way == multihead::Way::kFused,
              "the fused kernels did not run: ", route.reason);
}

// --- Contenders --------------------------------------------------------------

// What the hand-written form may take for its scores.
constexpr int64_t kScoreBytes = int64_t{1} << 28;
// The same in training, which keeps several.
constexpr int64_t kTrainingScoreBytes = int64_t{1} << 25;
// So many rows at least: if chance drops little in a small sample, the
// deviation of that sample is small as well, and would refuse a correct mean.
constexpr int64_t kRowsOfDropout = 4096;

// What rounding allows a contender: others than ours store scores in the dtype
// wherever they leave their fused path.
reference::Precision precision_of(Implementation who, at::ScalarType dtype) {
  return is_ours(who) ? attention_precision(dtype) : layer_precision(dtype);
}

// out (B, H, Lq, Dv) of as many draws of dropout, one after another, as make
// some thousand rows. ones: inputs whose values are 1.
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

// `results`, and after them the gradients of Σ results[0]·dout.
Outputs with_gradients(Outputs results, const std::vector<at::Tensor>& leaves,
                       const at::Tensor& dout, bool keep_graph = false) {
  const auto gradients =
      torch::autograd::grad({results[0]}, leaves, {dout}, keep_graph);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

// The inputs of one case, in training leaves, and what shall come of them.
struct Task {
  Pass pass;
  AttentionInputs inputs;
  InputRotation rotation;
  at::Tensor dout;  // undefined without a backward pass
  Reference reference;

  bool trains() const { return pass != Pass::kForward; }
};

// Gradients are those of Σ out·dout with dout drawn at random.
std::shared_ptr<Task> make_task(const AttentionInputs& drawn, Pass pass,
                                bool cold, Random& random) {
  const bool trains = pass != Pass::kForward;
  const AttentionInputs inputs = trains ? leaves(drawn) : drawn;
  at::Tensor dout;
  if (trains) {
    auto sizes = drawn.query.sizes().vec();
    sizes.back() = drawn.value.size(-1);
    dout = random.normal(sizes, drawn.query.scalar_type());
  }
  return std::make_shared<Task>(Task{pass, inputs, InputRotation(inputs, cold),
                                     dout, reference_of(drawn, dout)});
}

// The output, and in training (d query, d key, d value).
Outputs run(const AttentionForm& form, const AttentionInputs& x,
            const at::Tensor& dout) {
  if (!dout.defined()) return {form(x)};
  const at::AutoGradMode with_grad(true);
  return with_gradients({form(x)}, {x.query, x.key, x.value}, dout);
}

std::string dropout_fault(const AttentionForm& form, const Task& task,
                          const reference::Precision& p) {
  AttentionInputs ones = task.inputs;
  ones.value = at::ones_like(ones.value);
  if (task.trains()) ones.value = leaf(ones.value);
  const std::string reason = implausible_dropout(sums_of_draws(form, ones));
  if (!reason.empty() || !task.trains()) return reason;
  const Outputs sums = run(form, ones, at::ones_like(task.dout));
  const double unit =
      (p.forward + p.backward_value) * p.unit(task.reference.lambda);
  return implausible_gradient(sums[0].detach(), sums[3], unit);
}

Contender attention_contender(Implementation who, const AttentionForm& form,
                              const std::shared_ptr<Task>& task) {
  const reference::Precision precision =
      precision_of(who, task->inputs.query.scalar_type());
  AttentionInputs exact = task->inputs;
  exact.options.dropout_p = 0;
  const auto graph = std::make_shared<Outputs>();
  Contender contender{.who = who};
  contender.prepare = [=] {
    const at::AutoGradMode grad_mode(task->trains());
    if (who == kOurs) expect_fused(task->inputs);
    if (task->pass == Pass::kBackward) *graph = {form(task->inputs)};
  };
  contender.timed = [=] {
    return run(form, task->rotation.next(), task->dout);
  };
  contender.verified = [=] { return run(form, exact, task->dout); };
  contender.fault = [=](const Outputs& out) {
    return fault(out, task->reference, precision);
  };
  if (task->pass == Pass::kBackward)
    contender.timed = [=] {
      const auto& [query, key, value, options] = task->inputs;
      return with_gradients(*graph, {query, key, value}, task->dout,
                            /*keep_graph=*/true);
    };
  if (task->inputs.options.dropout_p > 0)
    contender.dropout_fault = [=] {
      return dropout_fault(form, *task, precision);
    };
  return contender;
}

PreparedCase prepare(const BenchCase& test, const AttentionCall& call,
                     Random& random) {
  const AttentionInputs inputs = draw(call, random);
  const auto task = make_task(inputs, test.pass, test.cold, random);
  const int64_t element = inputs.query.element_size(),
                scores = call.B * call.H * call.Lq * call.Lk * element;
  // In training only with dropout, which PyTorch has no kernel for.
  const bool by_hand = task->trains() ? call.options.dropout_p > 0 &&
                                            scores <= kTrainingScoreBytes
                                      : scores <= kScoreBytes;
  PreparedCase prepared{.contenders = {},
                        .flop = attention_flop(inputs, test.pass)};
  auto forms = attention_forms(inputs, by_hand);
  const auto& ratios = test.target.ratios;
  if (std::ranges::find(ratios, kSeparate,
                        &decltype(Target::ratios)::value_type::first) !=
      ratios.end())
    forms.emplace_back(kSeparate, one_by_one);
  for (const auto& [who, form] : forms)
    prepared.contenders.push_back(attention_contender(who, form, task));
  for (const at::Tensor& x : {inputs.query, inputs.key, inputs.value})
    prepared.bytes += x.nbytes();
  prepared.bytes += task->reference.parts[0].result.value.numel() * element;
  return prepared;
}

// Judged as it is timed. In training, self-attention of ours and nn.MHA, with
// the gradients of the input and all parameters.
PreparedCase prepare(const BenchCase& test, const LayerCall& call,
                     Random& random) {
  const bool trains = test.pass != Pass::kForward;
  LayerInputs drawn = draw(call, random);
  drawn.layer.training = trains;
  const auto inputs =
      std::make_shared<const LayerInputs>(trains ? leaves(drawn) : drawn);
  const at::Tensor dout =
      trains ? random.normal(drawn.query.sizes(), call.dtype) : at::Tensor();
  const auto reference =
      std::make_shared<const Reference>(reference_of(drawn, dout));
  const AttentionLayer& layer = inputs->layer;
  const std::vector<at::Tensor> leaves{
      inputs->query, layer.in_proj_weight, layer.in_proj_bias,
      layer.out_proj_weight, layer.out_proj_bias};
  PreparedCase prepared{.contenders = {},
                        .flop = layer_flop(*inputs, test.pass),
                        .bytes = 2.0 * drawn.query.nbytes()};
  for (const auto& [who, form] : layer_forms(*inputs)) {
    const bool is_ours = who == kOurs;
    if (trains && !is_ours && who != kNnModule) continue;
    Contender& contender =
        prepared.contenders.emplace_back(Contender{.who = who});
    contender.prepare = [=] {
      const at::AutoGradMode with_grad(true);
      if (is_ours) expect_fused(*inputs);
    };
    contender.timed = form;
    if (trains)
      contender.timed = [=, form = form] {
        const at::AutoGradMode with_grad(true);
        return with_gradients(form(), leaves, dout);
      };
    contender.verified = contender.timed;
    contender.fault = [=](const Outputs& out) {
      return fault(out, *reference,
                   layer_precision(inputs->query.scalar_type()));
    };
  }
  return prepared;
}

// One step through a block with dropout. Contenders differ in its attention,
// which is what is verified, on the heads that the block makes.
PreparedCase prepare(const BenchCase&, const BlockCall& call, Random& random) {
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
  const auto task = make_task(heads, Pass::kBoth, /*cold=*/false, random);
  for (const auto& [who, form] : attention_forms(heads, /*by_hand=*/true)) {
    prepared.contenders.push_back(attention_contender(who, form, task));
    prepared.contenders.back().timed = [=, form = form] {
      const at::AutoGradMode with_grad(true);
      return with_gradients({forward(*block, form)}, block->leaves(), dout);
    };
  }
  return prepared;
}

PreparedCase prepare(const BenchCase& test, const RaggedCall& call,
                     Random& random) {
  return prepare_ragged(call, test.pass, random);
}

PreparedCase prepare(const BenchCase& test, const PagedCall& call,
                     Random& random) {
  return prepare_paged(call, test.cold, random);
}

PreparedCase prepare(const BenchCase& test, const CachedCall& call,
                     Random& random) {
  return prepare_cached(call, test.cold, random);
}

}  // namespace

PreparedCase prepare_case(const BenchCase& test, Random& random) {
  return std::visit(
      [&](const auto& call) { return prepare(test, call, random); }, test.call);
}

double attention_flop(const AttentionInputs& x, Pass pass) {
  const at::Tensor keep = pytorch::keep_mask(x);
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

void expect_fused(const AttentionInputs& x) {
  check_fused(multihead::route(x.query, x.key, x.value, x.options));
}

void expect_fused(const LayerInputs& x) {
  check_fused(multihead::route(x.query, x.key, x.value, x.layer, x.options));
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
