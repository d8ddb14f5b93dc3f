// SPDX-License-Identifier: MIT
//
// The attention of one layer of a real model, as a dump for `multihead show`:
//   bert_attention --model FOLDER --text TEXT [--layer N] DUMP.safetensors
// FOLDER is a BERT as it was published: model.safetensors, config.json and
// vocab.txt; or its .safetensors file, with --vocab and --num-heads beside it.
// The dump holds the input of the layer, its parameters and the tokens. The
// layers below run on multihead.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <multihead/multihead.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "word_piece.h"

namespace {

using nlohmann::json;

struct Options {
  std::string model, vocab, text, dump;
  int64_t layer = 0;
  std::optional<int64_t> num_heads;
};

[[noreturn]] void refuse(const std::string& argument,
                         const std::string& condition, const std::string& got) {
  throw std::invalid_argument(argument + " must " + condition + ", got " + got);
}

int64_t whole_number(const std::string& name, const std::string& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, number).ptr != end || text.empty())
    refuse(name, "be a whole number", text);
  return number;
}

Options parse(const std::vector<std::string>& words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& name = words[i];
    if (!name.starts_with("--")) {
      options.dump = name;
      continue;
    }
    if (++i == words.size()) refuse(name, "have a value", "none");
    if (name == "--model")
      options.model = words[i];
    else if (name == "--vocab")
      options.vocab = words[i];
    else if (name == "--text")
      options.text = words[i];
    else if (name == "--layer")
      options.layer = whole_number(name, words[i]);
    else if (name == "--num-heads")
      options.num_heads = whole_number(name, words[i]);
    else
      refuse("an option", "be one that there is", name);
  }
  if (options.model.empty() || options.text.empty())
    refuse("--text", "come with --model, and --model with --text",
           options.text.empty() ? "--model alone" : "--text alone");
  if (options.dump.empty()) refuse("the dump", "have a name", "none");
  return options;
}

// "" where there is none.
std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A JSON object beside the weights; an empty one where there is no such file.
json read_settings(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return json::object();
  json settings = json::parse(read_file(path), nullptr, false);
  if (!settings.is_object())
    refuse("--model",
           "have a " + path.filename().string() + " that is a JSON object",
           "something else");
  return settings;
}

// Whether it is of type T, and what T is called.
template <class T>
std::pair<bool, const char*> judged(const json& value) {
  if (std::is_same_v<T, bool>) return {value.is_boolean(), "true or false"};
  if (std::is_integral_v<T>)
    return {value.is_number_integer(), "a whole number"};
  if (std::is_floating_point_v<T>) return {value.is_number(), "a number"};
  return {value.is_string(), "a string"};
}

// What stands under `key`, of the type of `otherwise`.
template <class T>
T setting(const json& settings, const std::string& key, T otherwise) {
  const auto found = settings.find(key);
  if (found == settings.end() || found->is_null()) return otherwise;
  const auto [fits, kind] = judged<T>(*found);
  if (!fits)
    refuse("--model", "have a " + key + " that is " + kind,
           found->dump(-1, ' ', false, json::error_handler_t::replace));
  return found->get<T>();
}

// The files of a model.
struct Files {
  explicit Files(const Options& options) {
    const std::filesystem::path given = options.model;
    if (!std::filesystem::exists(given))
      refuse("--model",
             "be a folder with model.safetensors, config.json and vocab.txt, "
             "or its .safetensors file",
             options.model + ", which does not exist");
    const bool is_folder = std::filesystem::is_directory(given);
    weights = is_folder ? given / "model.safetensors" : given;
    const std::filesystem::path folder = weights.parent_path();
    config = read_settings(folder / "config.json");
    lower_case = setting(read_settings(folder / "tokenizer_config.json"),
                         "do_lower_case", true);
    vocabulary = options.vocab.empty() ? folder / "vocab.txt"
                                       : std::filesystem::path(options.vocab);
    if (!std::filesystem::is_regular_file(vocabulary))
      refuse(options.vocab.empty() ? "--model" : "--vocab",
             options.vocab.empty()
                 ? "come with a vocab.txt, or --vocab with another name of it"
                 : "name the vocabulary of the model, a token on each line",
             vocabulary.string() + ", which is no file");
  }
  std::filesystem::path weights, vocabulary;
  json config;
  bool lower_case = true;
};

class Bert {
 public:
  Bert(const Files& files, const Options& options)

      : content_(multihead::read_safetensors(files.weights.string())),
        config_(files.config) {
    using std::string;
    if (const auto type = setting(config_, "model_type", string("bert"));
        type != "bert")
      refuse("--model", "be a BERT", type);
    if (const auto positions =
            setting(config_, "position_embedding_type", string("absolute"));
        positions != "absolute")
      refuse("--model", "have absolute positions", positions);
    if (!content_.tensors.contains(prefix_ + kWords)) prefix_ = "bert.";
    if (!content_.tensors.contains(prefix_ + kWords))
      refuse("--model", std::string("hold the tensor ") + kWords, "others");
    heads_ = options.num_heads.value_or(
        setting(config_, "num_attention_heads", int64_t{0}));
    const int64_t width = tensor(kWords).size(1);
    if (heads_ < 1 || width % heads_ != 0)
      refuse("--num-heads",
             "divide the model's width of " + std::to_string(width),
             heads_ == 0 ? "nothing, and no config.json says it"
                         : std::to_string(heads_));
  }

  int64_t layers() const {
    int64_t count = 0;
    while (content_.tensors.contains(prefix_ + layer_name(count) +
                                     "attention.self.query.weight"))
      ++count;
    return count;
  }

  int64_t longest() const { return tensor(kPositions).size(0); }

  // (1, L, E), the input of the first layer.
  at::Tensor embed(const std::vector<Token>& tokens) const {
    std::vector<int64_t> ids;
    for (const Token& token : tokens) ids.push_back(token.id);
    const at::Tensor words = tensor(kWords);
    if (const int64_t most = *std::ranges::max_element(ids);
        most >= words.size(0))
      refuse(
          "--vocab",
          "be of this model, of " + std::to_string(words.size(0)) + " tokens",
          "token number " + std::to_string(most));
    at::Tensor x = words.index_select(0, at::tensor(ids));
    x = x + tensor(kPositions).narrow(0, 0, x.size(0));
    x = x + tensor("embeddings.token_type_embeddings.weight")[0];
    return norm("embeddings.LayerNorm", x).unsqueeze(0);
  }

  // The names of the parameters are those of nn.MultiheadAttention.
  std::map<std::string, at::Tensor> attention(int64_t number) const {
    const std::string name = layer_name(number) + "attention.";
    std::map<std::string, at::Tensor> parameters;
    for (const std::string kind : {"weight", "bias"}) {
      const auto part = [&](const std::string& role) {
        return tensor(name + "self." + role + "." + kind);
      };
      parameters["in_proj_" + kind] =
          at::cat({part("query"), part("key"), part("value")});
      parameters["out_proj." + kind] = tensor(name + "output.dense." + kind);
    }
    return parameters;
  }

  // A whole layer, (1, L, E) to (1, L, E).
  at::Tensor run_layer(int64_t number, const at::Tensor& x) const {
    const auto parameters = attention(number);
    const multihead::AttentionLayer layer{
        .embed_dim = x.size(-1),
        .num_heads = heads_,
        .in_proj_weight = parameters.at("in_proj_weight"),
        .in_proj_bias = parameters.at("in_proj_bias"),
        .out_proj_weight = parameters.at("out_proj.weight"),
        .out_proj_bias = parameters.at("out_proj.bias"),
        .batch_first = true};
    const at::Tensor attended =
        std::get<0>(multihead::multi_head_attention_forward(
            x, x, x, layer, multihead::ForwardOptions().need_weights(false)));
    const std::string name = layer_name(number);
    const at::Tensor y =
        norm(name + "attention.output.LayerNorm", x + attended);
    const at::Tensor wide = activate(linear(name + "intermediate.dense", y));
    return norm(name + "output.LayerNorm",
                y + linear(name + "output.dense", wide));
  }

  int64_t num_heads() const { return heads_; }

 private:
  static constexpr const char* kWords = "embeddings.word_embeddings.weight";
  static constexpr const char* kPositions =
      "embeddings.position_embeddings.weight";

  static std::string layer_name(int64_t number) {
    return "encoder.layer." + std::to_string(number) + ".";
  }

  at::Tensor tensor(const std::string& name) const {
    const auto found = content_.tensors.find(prefix_ + name);
    if (found == content_.tensors.end())
      refuse("--model", "hold the tensor " + prefix_ + name, "none");
    return found->second.to(at::kFloat);
  }

  at::Tensor linear(const std::string& name, const at::Tensor& x) const {
    return at::linear(x, tensor(name + ".weight"), tensor(name + ".bias"));
  }

  at::Tensor norm(const std::string& name, const at::Tensor& x) const {
    const at::Tensor weight = tensor(name + ".weight");
    return at::layer_norm(x, weight.sizes(), weight, tensor(name + ".bias"),
                          setting(config_, "layer_norm_eps", 1e-12));
  }

  at::Tensor activate(const at::Tensor& x) const {
    const std::string name =
        setting(config_, "hidden_act", std::string("gelu"));
    if (name == "gelu") return at::gelu(x);
    if (name == "relu") return at::relu(x);
    if (name == "gelu_new" || name == "gelu_pytorch_tanh")
      return at::gelu(x, "tanh");
    refuse("--model", "have an activation gelu, gelu_new or relu", name);
  }

  multihead::Safetensors content_;
  json config_;
  std::string prefix_;
  int64_t heads_ = 0;
};

void write_dump(const Options& options) {
  const Files files(options);
  const Bert bert(files, options);
  const int64_t layers = bert.layers(), wanted = options.layer;
  if (layers == 0)
    refuse("--model", "hold encoder.layer.0.attention.self.query.weight",
           "none");
  if (wanted < 0 || wanted >= layers)
    refuse("--layer", "be from 0 to " + std::to_string(layers - 1),
           std::to_string(wanted));
  const std::vector<Token> tokens =
      WordPiece(read_file(files.vocabulary), files.lower_case)
          .tokenise(options.text);
  if (static_cast<int64_t>(tokens.size()) > bert.longest())
    refuse("--text",
           "have at most the model's " + std::to_string(bert.longest()) +
               " tokens",
           std::to_string(tokens.size()));
  at::Tensor x = bert.embed(tokens);
  for (int64_t layer = 0; layer < wanted; ++layer) x = bert.run_layer(layer, x);
  json names = json::array();
  for (const Token& token : tokens) names.push_back(token.text);
  multihead::Safetensors dump;
  for (const auto& [name, parameter] : bert.attention(wanted))
    dump.tensors[name] = parameter;
  dump.tensors["x"] = x;
  dump.metadata = {
      {"title", "layer " + std::to_string(wanted) + ": " + options.text},
      {"num_heads", std::to_string(bert.num_heads())},
      {"tokens", names.dump()}};
  multihead::write_safetensors(options.dump, dump);
}

}  // namespace

int main(int argc, char** argv) {
  const at::NoGradGuard no_grad;
  try {
    write_dump(parse({argv + 1, argv + argc}));
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr,
                 "bert_attention: --model must hold tensors whose shapes fit "
                 "each other, got others (%s)\n",
                 error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bert_attention: %s\n", error.what());
  }
  return 2;
}
