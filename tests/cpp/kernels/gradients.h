// SPDX-License-Identifier: MIT
//
// The backward kernels' results, and the loops' judgement of them.
#pragma once

#include "multihead/kernels/kernels.h"
#include "tests/cpp/kernels/judge.h"
#include "tests/cpp/kernels/random_call.h"

namespace kernel_test {

/// What a call is differentiated with: dout (B, H, Lq, Dv), dlogsumexp
/// (1, B, H, Lq).
struct OutputGradients {
  Tensor out, logsumexp;
};

inline OutputGradients random_gradients(Rng& rng, const Call& c) {
  const Shape& s = c.shape;
  // float16 stays within its range.
  const double magnitude =
      c.dtype == Dtype::kFloat16 ? 1e-2 : pick<double>(rng, {1, 1e-2, 30});
  OutputGradients g{
      random_rows(rng, storage_of(c.dtype), {s.B, s.H, s.Lq, s.Dv}, magnitude),
      Tensor(compute_storage_of(c.dtype), {1, s.B, s.H, s.Lq})};
  const double factor = pick<double>(rng, {0, 1});
  g.logsumexp.fill([&](const Index&) { return factor * normal(rng); });
  return g;
}

struct GradientResult {
  Tensor query, key, value;
  Tensor bias;           ///< like the mask, 1 where it repeats itself
  Tensor slopes, sinks;  ///< (1, 1, B, H)

  std::vector<std::pair<const char*, const Tensor*>> all() const {
    return {{"dquery", &query}, {"dkey", &key},       {"dvalue", &value},
            {"dbias", &bias},   {"dslopes", &slopes}, {"dsinks", &sinks}};
  }
};

/// The sizes of the mask's gradient.
inline Index bias_sizes(const Call& c) {
  Index sizes = c.mask.sizes();
  for (int n = 0; n < 4; ++n) {
    if (c.mask.strides()[n] == 0) sizes[n] = std::min<int64_t>(1, sizes[n]);
  }
  return sizes;
}

/// Which of the three large gradients are wanted, and where they lie: dense
/// where there are no strides.
struct Wanted {
  bool query = true, key = true, value = true;
  std::optional<Index> query_strides = {}, key_strides = {}, value_strides = {};
};

inline void run_backward(const Variant& variant,
                         const kernels::BackwardArgs& arguments,
                         const Running& running) {
  Guarded workspace(0, Edge::kEnd);
  kernels::run_backward(
      variant.kernels.backward, arguments, running.threads,
      [&](size_t bytes) {
        workspace = Guarded(bytes, Edge::kEnd);
        return workspace.data();
      },
      [&](const auto& stage, const kernels::BackwardRun& run) {
        run_tasks(stage, run, running);
      });
  EXPECT_TRUE(workspace.intact()) << "written beside the workspace";
}

inline GradientResult backward(const Variant& variant, const Call& c,
                               const Result& result,
                               const OutputGradients& gradients,
                               const Running& running = {},
                               const Wanted& wanted = {}) {
  const Shape& s = c.shape;
  const Storage storage = storage_of(c.dtype);
  const auto rows = [&](const Index& sizes, const std::optional<Index>& at) {
    return output(storage, sizes, at.value_or(dense_strides(sizes)));
  };
  GradientResult r{rows({s.B, s.H, s.Lq, s.D}, wanted.query_strides),
                   rows({s.B, s.G, s.Lk, s.D}, wanted.key_strides),
                   rows({s.B, s.G, s.Lk, s.Dv}, wanted.value_strides),
                   {},
                   {},
                   {}};
  kernels::BackwardArgs b;
  b.attention = arguments_of(c);
  b.out = rows_of(result.out);
  b.dout = rows_of(gradients.out);
  b.logsumexp = result.logsumexp.data();
  b.dlogsumexp = gradients.logsumexp.data();
  if (wanted.query) b.dquery = out_rows_of(r.query);
  if (wanted.key) b.dkey = out_rows_of(r.key);
  if (wanted.value) b.dvalue = out_rows_of(r.value);
  if (c.mask_kind == Kind::kBias) {
    r.bias = output(compute_storage_of(c.dtype), bias_sizes(c));
    Index at = r.bias.strides();
    for (int n = 0; n < 4; ++n) at[n] = c.mask.strides()[n] == 0 ? 0 : at[n];
    b.dbias = {r.bias.data(), at[0], at[1], at[2], at[3]};
  }
  const auto of_heads = [&](bool wanted, Tensor& x) -> double* {
    if (!wanted) return nullptr;
    x = output(Storage::kFloat64, {1, 1, s.B, s.H});
    return static_cast<double*>(x.data());
  };
  b.dalibi_slopes = of_heads(!c.slopes.empty(), r.slopes);
  b.dsinks = of_heads(!c.sinks.empty(), r.sinks);
  run_backward(variant, b, running);
  for (const auto& [name, x] : r.all()) {
    EXPECT_TRUE(x->memory().intact()) << "written beside " << name;
  }
  return r;
}

/// The largest |x − golden| / allowed so far, by gradient.
struct WorstGradients {
  double query = 0, key = 0, value = 0, bias = 0, heads = 0;
};

/// Sums over what the mask repeats.
inline reference::Values like_bias(const Call& c,
                                   const reference::Values& full) {
  const Index sizes = bias_sizes(c), all = c.mask.sizes();
  const Index strides = dense_strides(sizes);
  reference::Values sums(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  size_t next = 0;
  for_each_index(all, [&](const Index& i) {
    int64_t at = 0;
    for (int n = 0; n < 4; ++n)
      at += sizes[n] == all[n] ? i[n] * strides[n] : 0;
    sums[at] += full[next++];
  });
  return sums;
}

inline double largest(const reference::Values& values) {
  double result = 0;
  for (double x : values) result = std::max(result, std::abs(x));
  return result;
}

/// `golden`: of the call, with dropout as it was.
inline void judge_backward(const Call& c, const Golden& golden,
                           const OutputGradients& gradients,
                           const GradientResult& result,
                           WorstGradients& worst) {
  const reference::Values dout = gradients.out.values();
  const reference::Attention& a = golden.arguments;
  const reference::Gradients g =
      reference::backward(a, golden.output, dout, gradients.logsumexp.values());
  const double lambda = golden.output.lambda;
  // The floor of a weight, times what a gradient multiplies it by and how many
  // it adds.
  const reference::Precision stored = weights_precision_of(c);
  const double rows = static_cast<double>(c.shape.Lq * c.shape.H),
               keys = static_cast<double>(c.shape.Lk),
               dweight = largest(dout) * largest(a.value) *
                             static_cast<double>(c.shape.Dv) +
                         largest(gradients.logsumexp.values()),
               floor = std::max(1.0, dweight) * 2;
  const auto check = [&](const char* what, const Tensor& x,
                         const reference::Values& value,
                         const reference::Values& scale, double factor,
                         double times, double& most) {
    reference::Precision p = stored;
    p.tiny *= std::max(1.0, times);
    most = std::max(
        most,
        judge(x.values(), {what, value, p.allowed(scale, lambda, factor)}));
  };
  const double c_of = stored.backward;
  const double scale = std::abs(c.scale);
  check("dquery", result.query, g.query, g.query_scale, c_of,
        floor * keys * scale * largest(a.key), worst.query);
  check("dkey", result.key, g.key, g.key_scale, c_of,
        floor * rows * scale * largest(a.query), worst.key);
  check("dvalue", result.value, g.value, g.value_scale, stored.backward_value,
        rows * largest(dout), worst.value);
  if (!result.bias.empty()) {
    check("dbias", result.bias, like_bias(c, g.bias),
          like_bias(c, g.bias_scale), c_of, floor * rows * keys, worst.bias);
  }
  if (!result.slopes.empty()) {
    check("dslopes", result.slopes, g.alibi_slopes, g.alibi_slopes_scale, c_of,
          floor * rows * keys * (rows + keys), worst.heads);
  }
  if (!result.sinks.empty()) {
    const Shape& s = c.shape;
    Tensor sums(Storage::kFloat64, {1, 1, 1, s.H});
    sums.fill([&](const Index& i) {
      double sum = 0;
      for (int64_t b = 0; b < s.B; ++b)
        sum += result.sinks.get({0, 0, b, i[3]});
      return sum;
    });
    check("dsinks", sums, g.sinks, g.sinks_scale, c_of, floor * rows,
          worst.heads);
  }
}

}  // namespace kernel_test
