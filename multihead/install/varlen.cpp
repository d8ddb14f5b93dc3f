// SPDX-License-Identifier: MIT
//
// aten::_flash_attention_forward and its relatives: what
// torch.nn.attention.varlen calls. PyTorch has them for GPUs alone, so nothing
// is handed back to it.
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <typeinfo>
#include <utility>

#include "multihead/attention/call.h"
#include "multihead/attention/count.h"
#include "multihead/install/overrides.h"
#include "multihead/optional_tensor.h"

namespace multihead::overrides {
namespace {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;
using Size = std::optional<c10::SymInt>;

// FlashAttention's rules in our words: all positions from the bottom right.
AttentionOptions flash_options(double dropout_p, bool is_causal,
                               std::optional<double> scale, const Size& left,
                               const Size& right) {
  const auto limit = [](const Size& size) {
    return size ? size->guard_int(__FILE__, __LINE__) : int64_t{-1};
  };
  return {.dropout_p = dropout_p,
          .is_causal = is_causal,
          .scale = scale,
          .enable_gqa = true,
          .causal_alignment = CausalAlignment::kBottomRight,
          .window = {{limit(left), limit(right)}}};
}

// PyTorch's operators are below autocast: they compute in the dtype that they
// are given, and so must the operators that they call.
class WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// What `run` throws, with the names of torch.nn.attention.varlen's arguments;
// lengths: what key_lengths were given as.
template <typename Run>
auto in_their_words(const char* lengths, Run run) {
  const auto renamed = [&](const c10::Error& error) {
    std::string text = error.msg();
    for (const auto& [ours, theirs] :
         {std::pair("varlen_attention: ", "varlen_attn: "),
          {"cu_seqlens_", "cu_seq_"},
          {"key_lengths", lengths},
          {": window ", ": window_size "}}) {
      c10::ReplaceAll(text, ours, theirs);
    }
    return text;
  };
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  try {
    return run();
  } catch (const c10::ValueError& error) {
    throw c10::ValueError(here, renamed(error));
  } catch (const c10::Error& error) {
    if (typeid(error) != typeid(c10::Error)) throw;
    throw c10::Error(here, renamed(error));
  }
}

// Seed and offset as PyTorch's operators hand them on, and back.
Tensor rng_state_of(const std::optional<Tensor>& dropout_state) {
  return dropout_state ? dropout_state->view(at::kUInt64)
                       : at::empty({2}, at::kUInt64).fill_(0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> run_flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    OptionalTensor cum_seq_q, OptionalTensor cum_seq_k, c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/, double dropout_p, bool is_causal,
    bool /*return_debug_mask*/, std::optional<double> scale, Size window_left,
    Size window_right, OptionalTensor seqused_k, OptionalTensor alibi_slopes,
    OptionalTensor block_table, std::optional<int64_t> /*num_splits*/) {
  TORCH_CHECK_VALUE(cum_seq_q,
                    "varlen_attn: cu_seq_q must be given on the CPU, got None");
  const WithoutAutocast below;
  AttentionOptions options =
      flash_options(dropout_p, is_causal, scale, window_left, window_right);
  options.alibi_slopes = or_undefined(alibi_slopes);
  options.key_lengths = or_undefined(seqused_k);
  // Bounds beside pages tell their lengths alone.
  const bool told_by_bounds = block_table && cum_seq_k && !seqused_k;
  if (told_by_bounds) options.key_lengths = cum_seq_k->diff();
  const SourceGuard source(Source::kInstalled);
  const auto state = call::draw_dropout_state(dropout_p);
  const auto [out, logsumexp] =
      in_their_words(told_by_bounds ? "cu_seq_k.diff()" : "seqused_k", [&] {
        return call::run<call::FusedVarlenAttention>(
            query, key, value, *cum_seq_q,
            block_table ? std::nullopt : cum_seq_k, block_table, options,
            state);
      });
  return {out, logsumexp.to(at::kFloat), rng_state_of(state),
          at::empty({}, at::kUInt64).fill_(0), at::empty({0}, query.options())};
}

Tensor run_flash_forward_inplace(
    Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
    OptionalTensor cum_seq_q, OptionalTensor cum_seq_k, c10::SymInt max_q,
    c10::SymInt max_k, double /*dropout_p*/, bool is_causal,
    bool return_debug_mask, std::optional<double> scale, Size window_left,
    Size window_right, OptionalTensor seqused_k, OptionalTensor alibi_slopes,
    OptionalTensor block_table, std::optional<int64_t> num_splits) {
  const auto results = run_flash_forward(
      query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal,
      return_debug_mask, scale, window_left, window_right, seqused_k,
      alibi_slopes, block_table, num_splits);
  const Tensor& computed = std::get<0>(results);
  TORCH_CHECK(out.sizes() == computed.sizes() &&
                  out.scalar_type() == computed.scalar_type(),
              "varlen_attn_out: out must be ", computed.scalar_type(), " ",
              computed.sizes(), ", got ", out.scalar_type(), " ", out.sizes());
  out.copy_(computed);
  return std::get<1>(results);
}

std::tuple<Tensor, Tensor, Tensor> run_flash_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& logsumexp,
    const Tensor& cum_seq_q, const Tensor& cum_seq_k, c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/, double dropout_p, bool is_causal,
    const Tensor& rng_state, const Tensor& /*unused*/,
    std::optional<double> scale, Size window_left, Size window_right) {
  const WithoutAutocast below;
  const AttentionOptions options =
      flash_options(dropout_p, is_causal, scale, window_left, window_right);
  std::optional<Tensor> state;
  if (dropout_p > 0) state = rng_state.view(at::kLong);
  Tensor exact = logsumexp;
  // PyTorch keeps it in float32.
  if (query.scalar_type() == at::kDouble) {
    exact = std::get<1>(call::run<call::FusedVarlenAttention>(
        query, key, value, cum_seq_q, optional(cum_seq_k),
        std::optional<Tensor>(), options, state));
  }
  const auto gradients = call::run<call::FusedVarlenAttentionBackward>(
      grad_out, std::optional<Tensor>(), query, key, value, out, exact,
      cum_seq_q, cum_seq_k, call::Needs{true, true, true}, options, state);
  return {std::get<0>(gradients), std::get<1>(gradients),
          std::get<2>(gradients)};
}

}  // namespace

void variable_length_attention(Registrations& all) {
  torch::Library& library = library_for(all, c10::DispatchKey::CPU);
  library.impl("_flash_attention_forward", TORCH_FN(run_flash_forward));
  library.impl("_flash_attention_forward_no_dropout_inplace",
               TORCH_FN(run_flash_forward_inplace));
  library.impl("_flash_attention_backward", TORCH_FN(run_flash_backward));
}

}  // namespace multihead::overrides
