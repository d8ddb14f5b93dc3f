// SPDX-License-Identifier: MIT
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "cli/show/source.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/text.h"
#include "diagnosis/dump/observed_call.h"

namespace cli {
namespace {

using multihead::Safetensors;
using multihead::diagnosis::GivenMask;
using multihead::diagnosis::MaskMeaning;
using multihead::diagnosis::ObservedCall;

constexpr const char* kWeights[] = {"weights", "attn_weights",
                                    "attention_weights"};

const at::Tensor* find_weights(const Safetensors& dump) {
  for (const char* name : kWeights)
    if (const auto found = dump.tensors.find(name); found != dump.tensors.end())
      return &found->second;
  return nullptr;
}

bool holds_weights(const Safetensors& dump) { return find_weights(dump); }

bool holds_inputs(const Safetensors& dump) {
  return dump.tensors.contains("query") || dump.tensors.contains("x");
}

// bool (B or 1, H or 1, Lq or 1, Lk), undefined without a mask.
at::Tensor keep_of(const GivenMask& mask, const char* name) {
  if (!mask.numbers.defined() || mask.meaning == MaskMeaning::kAdditive)
    return {};
  if (mask.meaning == MaskMeaning::kUnknown)
    refuse(std::string("the dump's ") + name,
           "be known as blocked, keep or additive (metadata mask and padding, "
           "or --mask)",
           "neither");
  return mask.meaning == MaskMeaning::kKeep ? mask.numbers.ne(0)
                                            : mask.numbers.eq(0);
}

// The run's masks as one.
multihead::AttentionOptions options_of(const ObservedCall& run,
                                       at::ScalarType dtype) {
  multihead::AttentionOptions options{
      .is_causal = run.causal == multihead::diagnosis::CausalRequest::kYes,
      .scale = run.scale,
      .enable_gqa = true};
  at::Tensor keep, bias;
  for (const auto& [mask, name] :
       {std::pair{&run.mask, "mask"}, {&run.padding, "key_padding_mask"}}) {
    if (const at::Tensor kept = keep_of(*mask, name); kept.defined())
      keep = keep.defined() ? keep.logical_and(kept) : kept;
    else if (mask->numbers.defined())
      bias = bias.defined() ? bias + mask->numbers : mask->numbers;
  }
  if (bias.defined() && keep.defined()) bias = at::where(keep, bias, -INFINITY);
  options.attn_mask = bias.defined() ? bias.to(dtype) : keep;
  return options;
}

ObservedCall make_run(Safetensors dump) {
  // What came out is not shown, and need not be there.
  if (!dump.tensors.contains("out") && !dump.tensors.contains("output")) {
    const auto query = dump.tensors.find("query");
    dump.tensors["out"] =
        query != dump.tensors.end() ? query->second : dump.tensors.at("x");
  }
  try {
    return multihead::diagnosis::read_dump(dump);
  } catch (const std::exception& error) {  // "explain: mask must ..."
    std::string what = error.what();
    if (what.starts_with("explain: ")) what.replace(0, 9, "show: ");
    throw std::invalid_argument(what);
  }
}

const std::string* find_fact(const Safetensors& dump, const char* name) {
  const auto fact = dump.metadata.find(name);
  return fact == dump.metadata.end() ? nullptr : &fact->second;
}

// The heads that a dump's metadata state, or `otherwise`.
int64_t stated_heads(const Safetensors& dump, int64_t otherwise) {
  constexpr int64_t kMost = 1 << 16;
  const std::string* fact = find_fact(dump, "num_heads");
  if (!fact) return otherwise;
  const int64_t heads = std::atoll(fact->c_str());
  if (heads < 1 || heads > kMost)
    refuse("the dump's num_heads", "be from 1 to " + std::to_string(kMost),
           *fact);
  return heads;
}

// Weights as (B, H, Lq, Lk), or their mean over `mean_of` heads. As
// nn.MultiheadAttention returns it, that has no dimension of heads.
void set_weights(AttentionSource& source, const at::Tensor& weights,
                 const Safetensors& dump) {
  const int64_t dims = weights.dim();
  if (!weights.is_floating_point() || dims < 2 || dims > 4 ||
      weights.numel() == 0)
    refuse("the dump's weights",
           "be floating and have the shape (B, H, Lq, Lk), (H, Lq, Lk), "
           "(B, Lq, Lk) or (Lq, Lk), without a size of 0",
           std::string(c10::toString(weights.scalar_type())) + " of shape " +
               shape_text(weights.sizes().vec()));
  const int64_t given = dims == 2 ? 1 : weights.size(dims - 3);
  const int64_t heads = dims == 4 ? given : stated_heads(dump, given);
  if (heads != given) source.mean_of = heads;
  source.weights = weights.detach();
  if (dims == 3) source.weights = weights.unsqueeze(heads == given ? 0 : 1);
  if (dims == 2) source.weights = weights.unsqueeze(0).unsqueeze(0);
}

int64_t kv_heads(const Safetensors& dump, int64_t heads) {
  const std::string* fact = find_fact(dump, "num_kv_heads");
  if (!fact) return heads;
  const int64_t groups = std::atoll(fact->c_str());
  if (groups < 1 || heads % groups != 0)
    refuse("the dump's num_kv_heads",
           "divide its " + std::to_string(heads) + " heads", *fact);
  return groups;
}

std::string title_of(const Safetensors& dump, const ShowOptions& options) {
  const std::string* title = find_fact(dump, "title");
  return printable(title ? *title : options.dump);
}

void set_tokens(AttentionSource& source, const Safetensors& dump,
                const ShowOptions& options) {
  const auto read = [&](const std::string& option, const char* option_name,
                        const char* fact, int64_t length) {
    TokenLists lists;
    std::string name = option_name;
    if (!option.empty()) {
      lists = parse_tokens(option, name);
    } else if (const std::string* found = find_fact(dump, fact)) {
      name = std::string("the dump's ") + fact;
      lists = parse_tokens(*found, name);
    }
    check_tokens(lists, name, source.batch_size(), length);
    return lists;
  };
  source.keys = read(options.tokens, "--tokens", "tokens", source.key_length());
  source.queries = read(options.query_tokens, "--query-tokens", "query_tokens",
                        source.query_length());
  if (source.queries.empty() && source.query_length() == source.key_length())
    source.queries = source.keys;
}

// The steps from `input` (B, L, E), undefined if heads are all there is, to the
// output, for heads query (B, H, Lq, D) and key (B, G, Lk, D).
std::vector<Stage> stages_of(const at::Tensor& input, const at::Tensor& query,
                             const at::Tensor& key) {
  const int64_t B = query.size(0), H = query.size(1), Lq = query.size(2),
                D = query.size(3), G = key.size(1), Lk = key.size(2);
  const std::string root = "q·kᵀ / √" + std::to_string(D);
  std::vector<Stage> stages;
  if (input.defined()) {
    stages.push_back({"input", "x", input.sizes().vec()});
    stages.push_back(
        {"projections", "q = x·Wᵀ + b; k, v alike", {B, Lq, H * D}});
  }
  stages.push_back(
      {"heads", "q in " + std::to_string(H) + " parts", {B, H, Lq, D}});
  if (G != H)
    stages.push_back(
        {"k, v heads", "in " + std::to_string(G) + " parts", {B, G, Lk, D}});
  stages.push_back({"scores", root, {B, H, Lq, Lk}});
  stages.push_back({"weights", "softmax over keys", {B, H, Lq, Lk}});
  stages.push_back({"context", "weights·v", {B, H, Lq, D}});
  if (input.defined()) {
    stages.push_back({"merge", "heads side by side", {B, Lq, H * D}});
    stages.push_back({"output", "·W_oᵀ + b", input.sizes().vec()});
  }
  return stages;
}

// A dump with what the options add to it: tensors of --weights, and facts.
Safetensors read_files(const ShowOptions& options) {
  Safetensors dump = read_dump(options.dump);
  if (!options.weights.empty()) {
    Safetensors more = read_dump(options.weights);
    dump.tensors.merge(more.tensors);
    dump.metadata.merge(more.metadata);
  }
  if (!options.mask.empty()) dump.metadata["mask"] = options.mask;
  if (options.num_heads)
    dump.metadata["num_heads"] = std::to_string(*options.num_heads);
  if (!holds_weights(dump) && !holds_inputs(dump))
    refuse(options.dump, "hold a tensor weights, query or x",
           dump.tensors.empty() ? "none at all"
                                : dump.tensors.begin()->first + " and others");
  return dump;
}

// The weights that a dump holds, with the mask that goes with them.
AttentionSource given_weights(const Safetensors& dump,
                              const ShowOptions& options) {
  AttentionSource source{.title = title_of(dump, options)};
  set_weights(source, *find_weights(dump), dump);
  const int64_t B = source.batch_size(), H = source.num_heads(),
                Lq = source.query_length(), Lk = source.key_length();
  // Masks fit the weights as they would fit heads of the same sizes.
  Safetensors sizes{.metadata = dump.metadata};
  sizes.metadata["num_heads"] = std::to_string(H);
  sizes.tensors["query"] = at::zeros({B, H, Lq, 1});
  sizes.tensors["key"] = at::zeros({B, H, Lk, 1});
  for (const char* name : {"mask", "attn_mask", "key_padding_mask"})
    if (const auto found = dump.tensors.find(name); found != dump.tensors.end())
      sizes.tensors.insert(*found);
  source.options = options_of(make_run(sizes), at::kFloat);
  at::Tensor& mask = source.options.attn_mask;
  if (source.mean_of > 0 && mask.defined())
    mask = mask.amax(1, /*keepdim=*/true);  // blocked: for every head
  source.num_kv_heads = kv_heads(dump, H);
  source.stages = {{"weights",
                    source.mean_of > 0 ? "the mean of heads, as given"
                                       : "as they were given",
                    source.weights.sizes().vec()}};
  set_tokens(source, dump, options);
  return source;
}

// Attention on the heads that a dump holds as `query` and `key`, or projects
// from sequences: what its weights should be.
AttentionSource computed_weights(const Safetensors& dump,
                                 const ShowOptions& options) {
  const ObservedCall run = make_run(dump);
  const at::ScalarType dtype =
      run.dtype == at::kDouble ? at::kDouble : at::kFloat;
  AttentionSource source{.title = title_of(dump, options)};
  const auto heads = [&](int role, int64_t count) {
    if (!run.has_weights) return run.inputs[role].to(dtype).contiguous();
    const auto& matrix = role == 0 ? run.weights.query : run.weights.key;
    return at::linear(run.inputs[role], matrix.weight, matrix.bias)
        .to(dtype)
        .unflatten(-1, {count, -1})
        .transpose(1, 2)
        .contiguous();
  };
  source.query = heads(0, run.sizes.heads);
  source.key = heads(1, run.sizes.kv_heads);
  if (source.query.size(0) != source.key.size(0) ||
      source.query.size(3) != source.key.size(3))
    refuse("the dump's key", "have the batch and the head width of query",
           shape_text(source.key.sizes().vec()) + " for " +
               shape_text(source.query.sizes().vec()));
  source.num_kv_heads = run.sizes.kv_heads;
  source.options = options_of(run, dtype);
  source.stages = stages_of(run.has_weights ? run.inputs[0] : at::Tensor(),
                            source.query, source.key);
  set_tokens(source, dump, options);
  return source;
}

// Positions of the example as angles at eight frequencies: two of them are the
// more alike the nearer they are.
at::Tensor angles(double shift) {
  const at::Tensor positions = at::arange(12, at::kFloat) - shift;
  const at::Tensor frequencies = (at::arange(8, at::kFloat) * -0.35).exp() * 2;
  const at::Tensor x = positions.unsqueeze(1) * frequencies;
  return at::cat({x.cos(), x.sin()}, -1);
}

// Four causal heads on two key/value heads that look back 0, 1, 2 and 4 tokens.
AttentionSource demonstration() {
  AttentionSource source{.title =
                             "an example: causal heads that look back 0, 1, 2 "
                             "and 4 tokens"};
  const at::Tensor key = angles(0);
  source.query = at::stack({angles(0), angles(1), angles(2), angles(4)})
                     .mul(3)
                     .unsqueeze(0);
  source.key = at::stack({key, key}).unsqueeze(0);
  source.num_kv_heads = 2;
  source.options = {.is_causal = true, .enable_gqa = true};
  source.stages = stages_of({}, source.query, source.key);
  source.keys = source.queries =
      parse_tokens("The cat sat on the mat because it was warm there .", "");
  return source;
}

}  // namespace

AttentionSource find_attention(const ShowOptions& options) {
  if (options.dump.empty()) return demonstration();
  const Safetensors dump = read_files(options);
  return holds_weights(dump) ? given_weights(dump, options)
                             : computed_weights(dump, options);
}

AttentionSource find_reference(const ShowOptions& options) {
  if (options.difference->empty()) {
    const Safetensors dump = read_files(options);
    if (!holds_weights(dump) || !holds_inputs(dump))
      refuse(options.dump,
             "hold weights and inputs, from which they follow, for "
             "--difference without a file",
             holds_weights(dump) ? "weights alone" : "inputs alone");
    return computed_weights(dump, options);
  }
  ShowOptions other = options;
  other.dump = *options.difference;
  other.tokens = other.query_tokens = "";
  return find_attention(other);
}

}  // namespace cli
