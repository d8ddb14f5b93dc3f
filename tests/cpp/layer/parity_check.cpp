// SPDX-License-Identifier: MIT
//
// Repeats in C++ what Python's torch.nn.MultiheadAttention did, from a file
// that tests/python/test_cpp_parity.py writes, and compares bits: initial
// parameters, output and its strides, weights, all gradients, final generator
// state. Prints what differs; exit status 1 if anything does.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <multihead/modules.h>
#include <multihead/safetensors.h>
#include <torch/utils.h>

#include <iostream>
#include <nlohmann/json.hpp>

namespace {

using at::Tensor;
using nlohmann::json;

// A contiguous copy, one element behind an aligned address.
Tensor at_odd_address(const Tensor& x) {
  return at::empty({x.numel() + 1}, x.options())
      .slice(0, 1)
      .view(x.sizes())
      .copy_(x);
}

class Case {
 public:
  Case(const multihead::Safetensors& file, std::string name)
      : file_(file),
        name_(std::move(name)),
        c_(json::parse(file.metadata.at(name_))) {}

  int differences() {
    torch::manual_seed(c_["seed"].get<int64_t>());
    multihead::MultiheadAttention module(options());
    for (const auto& p : module->named_parameters()) {
      compare("initial." + p.key(), p.value());
      const at::NoGradGuard no_grad;
      const Tensor given = tensor("parameter." + p.key());
      p.value().set_data(flag("odd_parameters") ? at_odd_address(given)
                                                : given.clone());
    }
    module->train(flag("training"));

    const Tensor query = input("query");
    const bool self = c_["sharing"] == "self";
    const Tensor key = self ? query : input("key");
    const Tensor value = c_["sharing"] == "distinct" ? input("value") : key;
    const Tensor mask = tensor_or_none("attn_mask");
    const Tensor padding = tensor_or_none("key_padding_mask");
    if (flag("mask_grad") && mask.defined() && mask.is_floating_point()) {
      mask.requires_grad_();
    }
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(tensor("generator.before"));
    const bool grad = flag("grad");
    at::AutoGradMode grad_mode(grad);
    const auto [out, weights] =
        module->forward(query, key, value,
                        multihead::ForwardOptions()
                            .attn_mask(mask)
                            .key_padding_mask(padding)
                            .need_weights(flag("need_weights"))
                            .average_attn_weights(flag("average"))
                            .is_causal(flag("hint")));
    compare("result.out", out);
    compare("result.weights", weights);
    report(out.strides() == c_["out_strides"].get<std::vector<int64_t>>(),
           "out strides");
    if (grad) {
      Tensor loss = out.to(at::kFloat).square().sum();
      if (weights.defined() && flag("weights_in_loss")) {
        loss = loss + weights.to(at::kFloat).square().sum();
      }
      loss.backward();
      compare("result.query.grad", query.grad());
      compare("result.key.grad", key.grad());
      compare("result.value.grad", value.grad());
      if (mask.defined()) compare("result.attn_mask.grad", mask.grad());
      for (const auto& p : module->named_parameters()) {
        compare("result." + p.key() + ".grad", p.value().grad());
      }
    }
    compare("result.generator", generator.get_state());
    return differences_;
  }

 private:
  multihead::MultiheadAttentionOptions options() const {
    const auto width = [&](const char* name) -> std::optional<int64_t> {
      if (c_[name].is_null()) return std::nullopt;
      return c_[name].get<int64_t>();
    };
    return multihead::MultiheadAttentionOptions(c_["embed_dim"],
                                                c_["num_heads"])
        .dropout(c_["dropout"].get<double>())
        .bias(flag("bias"))
        .add_bias_kv(flag("add_bias_kv"))
        .add_zero_attn(flag("add_zero_attn"))
        .kdim(width("kdim"))
        .vdim(width("vdim"))
        .batch_first(flag("batch_first"))
        .dtype(tensor("query").scalar_type());
  }

  bool flag(const char* name) const { return c_[name].get<bool>(); }

  Tensor tensor(const std::string& name) const {
    return file_.tensors.at(name_ + "." + name);
  }

  Tensor tensor_or_none(const std::string& name) const {
    const auto found = file_.tensors.find(name_ + "." + name);
    return found == file_.tensors.end() ? Tensor() : found->second;
  }

  // The file holds contiguous tensors; the call had these strides, and this
  // alignment.
  Tensor input(const std::string& name) const {
    Tensor x = tensor(name);
    if (c_["layout"] == "transposed" && flag("batched")) {
      x = x.transpose(0, 1).contiguous().transpose(0, 1);
    } else if (c_["layout"] == "gapped") {
      x = at::constant_pad_nd(x, {0, 3}).narrow(-1, 0, x.size(-1));
    } else if (c_["layout"] == "odd") {
      x = at_odd_address(x);
    }
    return flag("grad") ? x.detach().requires_grad_() : x;
  }

  void compare(const std::string& name, const Tensor& ours) {
    const Tensor theirs = tensor_or_none(name);
    if (ours.defined() != theirs.defined()) return report(false, name);
    if (!ours.defined()) return;
    const bool equal = ours.scalar_type() == theirs.scalar_type() &&
                       ours.sizes() == theirs.sizes() &&
                       at::equal(ours.isnan(), theirs.isnan()) &&
                       at::equal(ours.nan_to_num(), theirs.nan_to_num());
    report(equal, name);
  }

  void report(bool equal, const std::string& name) {
    if (equal) return;
    ++differences_;
    std::cout << "case " << name_ << ": " << name << " differs; " << c_ << '\n';
  }

  const multihead::Safetensors& file_;
  const std::string name_;
  const json c_;
  int differences_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: parity_check FILE\n";
    return 2;
  }
  at::set_num_threads(1);
  const auto file = multihead::read_safetensors(argv[1]);
  const multihead::BackendGuard exact(multihead::Backend::kExact);
  size_t equal = 0;
  for (const auto& [name, text] : file.metadata) {
    equal += Case(file, name).differences() == 0;
  }
  std::cout << equal << " of " << file.metadata.size() << " cases equal\n";
  return equal == file.metadata.size() ? 0 : 1;
}
