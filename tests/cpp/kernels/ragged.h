// SPDX-License-Identifier: MIT
//
// Batches of sequences in ragged rows and in pages, and what kernels make of
// them. Memory ends with the last row that exists, what no sequence has is NaN,
// and what is written beside a row is seen.
#pragma once

#include "tests/cpp/kernels/gradients.h"

namespace kernel_test {

/// `count` places of a dimension, bit for bit.
inline Tensor slice(const Tensor& x, int dimension, int64_t first,
                    int64_t count) {
  Index sizes = x.sizes();
  sizes[dimension] = count;
  Tensor part(x.storage(), sizes);
  for_each_index(sizes, [&](Index i) {
    std::byte* to = part.at(i);
    i[dimension] += first;
    memcpy(to, x.at(i), bytes_of(x.storage()));
  });
  return part;
}

/// Rows of the batch rows one after the other: (1, heads, T, width).
struct Ragged {
  std::vector<int64_t> starts;
  Tensor rows;

  /// `lengths` of the rows of x (B, heads, L, width); those from `used` on are
  /// left NaN.
  Ragged(Rng& rng, const Tensor& x, const std::vector<int64_t>& lengths,
         const std::vector<int64_t>& used)
      : starts{0} {
    for (int64_t n : lengths) starts.push_back(starts.back() + n);
    rows = empty(rng, x.storage(), x.sizes()[1], x.sizes()[3]);
    for (size_t b = 0; b < lengths.size(); ++b) {
      for_each_index({1, x.sizes()[1], used[b], x.sizes()[3]},
                     [&](const Index& i) {
                       const auto row = static_cast<int64_t>(b);
                       rows.set({0, i[1], starts[b] + i[2], i[3]},
                                x.get({row, i[1], i[2], i[3]}));
                     });
    }
  }

  Tensor empty(Rng& rng, Storage storage, int64_t heads, int64_t width) const {
    const Index sizes{1, heads, starts.back(), width};
    Tensor x(storage, sizes, random_row_strides(rng, sizes), random_edge(rng));
    x.fill_bytes(kUnwritten);
    return x;
  }
  kernels::StridedRows argument() const { return of(rows); }
  /// Another tensor of the same sequences.
  kernels::StridedRows of(const Tensor& x) const {
    kernels::StridedRows r = rows_of(x);
    r.batch = 0;
    r.starts = starts.data();
    return r;
  }
  kernels::StridedOutRows out_of(const Tensor& x) const {
    return {x.data(), 0, x.strides()[1], x.strides()[2], starts.data()};
  }
  /// What x has of sequence b in `dimension`, the one of the rows.
  Tensor part_of(const Tensor& x, int64_t b, int dimension = 2) const {
    return slice(x, dimension, starts[b], starts[b + 1] - starts[b]);
  }
};

/// Keys in pages of any order.
struct Pages {
  int64_t page, width = 1, count = 2;
  std::vector<int32_t> table;  ///< (B, width), −1 beyond a length

  Pages(Rng& rng, const std::vector<int64_t>& used, int64_t page) : page(page) {
    for (int64_t n : used) {
      count += (n + page - 1) / page;
      width = std::max(width, (n + page - 1) / page);
    }
    std::vector<int32_t> numbers(count);
    for (int64_t n = 0; n < count; ++n) numbers[n] = static_cast<int32_t>(n);
    std::shuffle(numbers.begin(), numbers.end(), rng);
    table.assign(used.size() * width, -1);
    for (size_t b = 0; b < used.size(); ++b) {
      for (int64_t j = 0; j < used[b]; j += page) {
        table[b * width + j / page] = numbers.back();
        numbers.pop_back();
      }
    }
  }

  /// The rows of x (B, heads, L, width) in pages (P, heads, page, width).
  Tensor pool_of(Rng& rng, const Tensor& x,
                 const std::vector<int64_t>& used) const {
    const Index sizes{count, x.sizes()[1], page, x.sizes()[3]};
    Tensor pool(x.storage(), sizes, random_row_strides(rng, sizes),
                random_edge(rng));
    pool.fill_bytes(0xFF);
    for (size_t b = 0; b < used.size(); ++b) {
      const auto row = static_cast<int64_t>(b);
      for_each_index({1, sizes[1], used[b], sizes[3]}, [&](const Index& i) {
        const int64_t entry = table[row * width + i[2] / page];
        pool.set({entry, i[1], i[2] % page, i[3]},
                 x.get({row, i[1], i[2], i[3]}));
      });
    }
    return pool;
  }
  kernels::StridedRows argument(const Tensor& pool) const {
    kernels::StridedRows r = rows_of(pool);
    r.block_table = table.data();
    r.table_stride = width;
    r.page = page;
    return r;
  }
};

inline std::vector<int64_t> random_lengths(Rng& rng,
                                           const std::vector<int64_t>& most) {
  std::vector<int64_t> lengths;
  for (int64_t n : most) {
    lengths.push_back(chance(rng, 0.15)  ? 0
                      : chance(rng, 0.3) ? n
                                         : uniform(rng, 0, n));
  }
  return lengths;
}

/// The first rows of batch row b, the others NaN.
inline Tensor part_of(const Tensor& x, int64_t b, int64_t rows, int64_t used) {
  Tensor part(x.storage(), {1, x.sizes()[1], rows, x.sizes()[3]});
  part.fill_bytes(0xFF);
  for_each_index({1, x.sizes()[1], used, x.sizes()[3]}, [&](const Index& i) {
    part.set(i, x.get({b, i[1], i[2], i[3]}));
  });
  return part;
}

/// A padded call, of which sequences take their rows.
struct Sequences {
  Call padded;
  std::vector<int64_t> queries, keys, used;  ///< used: of the keys
  Tensor lengths;                            ///< `used`

  Sequences(Call call, Rng& rng) : padded(std::move(call)) {
    padded.mask_kind = Kind::kNone;
    padded.key_mask = Tensor();
    padded.dropout = {};  // it would be that of batch row 0 for one alone
    const Shape& s = padded.shape;
    queries = random_lengths(rng, std::vector<int64_t>(s.B, s.Lq));
    keys = random_lengths(rng, std::vector<int64_t>(s.B, s.Lk));
    used = chance(rng, 0.5) ? keys : random_lengths(rng, keys);
    lengths = integers(used);
  }

  Call alone(int64_t b) const {
    const Call& c = padded;
    const Shape& s = c.shape;
    Call one(c.dtype, {1, s.H, s.G, queries[b], keys[b], s.D, s.Dv});
    one.query = part_of(c.query, b, queries[b], queries[b]);
    one.key = part_of(c.key, b, keys[b], used[b]);
    one.value = part_of(c.value, b, keys[b], used[b]);
    one.scale = c.scale;
    one.softcap = c.softcap;
    one.visibility = c.visibility;
    one.key_lengths = integers({used[b]});
    if (!c.query_offsets.empty()) {
      one.query_offsets =
          integers({static_cast<int64_t>(c.query_offsets.get({0, 0, 0, b}))});
    }
    if (!c.slopes.empty()) {
      one.slopes = Tensor(Storage::kFloat64, {1, 1, 1, s.H});
      one.slopes.fill(
          [&](const Index& i) { return c.slopes.get({0, 0, b, i[3]}); });
    }
    one.sinks = copy_of(c.sinks);
    return one;
  }

  /// All but query, key and value.
  kernels::AttentionArgs arguments() const {
    kernels::AttentionArgs a = arguments_of(padded);
    a.Lq = *std::max_element(queries.begin(), queries.end());
    a.Lk = *std::max_element(keys.begin(), keys.end());
    a.visibility.key_lengths = static_cast<int64_t*>(lengths.data());
    return a;
  }
};

/// Returns the plan.
inline kernels::Plan run_forward(const Variant& variant,
                                 const kernels::ForwardArgs& arguments,
                                 const Running& running) {
  std::optional<Guarded> workspace;
  kernels::run_forward(
      variant.kernels, arguments, running.threads,
      [&](size_t bytes) { return workspace.emplace(bytes, Edge::kEnd).data(); },
      [&](const auto& kernel, const auto& given, const kernels::Plan& plan) {
        run_tasks(kernel, given, plan, running);
      });
  return variant.kernels.forward.plan(arguments, running.threads);
}

/// The sequences of a batch, queries in ragged rows. What is computed of
/// sequence n is given as a call of its own returns it.
struct RaggedBatch {
  Rng rng;
  Sequences sequences;
  const Call& c = sequences.padded;
  Shape s = c.shape;
  Running running;
  Ragged query;
  Tensor out, logsumexp;

  RaggedBatch(Call call, uint64_t number)
      : rng(number),
        sequences(std::move(call), rng),
        running{.threads = number % 16 == 0 ? 3 : 1},
        query(rng, c.query, sequences.queries, sequences.queries) {}

  /// With these keys and values; returns the plan.
  kernels::Plan attend(const Variant& variant, kernels::StridedRows key,
                       kernels::StridedRows value) {
    out = query.empty(rng, c.query.storage(), s.H, s.Dv);
    logsumexp =
        output(compute_storage_of(c.dtype), {1, 1, s.H, query.starts.back()});
    arguments_ = sequences.arguments();
    arguments_.query = query.argument();
    arguments_.key = key;
    arguments_.value = value;
    const kernels::Plan plan = run_forward(
        variant, {arguments_, query.out_of(out), logsumexp.data()}, running);
    expect_clean(out);
    EXPECT_TRUE(logsumexp.memory().intact()) << "written beside logsumexp";
    return plan;
  }
  Result result_of(int64_t n) const {
    return {query.part_of(out, n), query.part_of(logsumexp, n, 3)};
  }

 protected:
  static void expect_clean(const Tensor& x) {
    EXPECT_TRUE(x.gaps_hold(kUnwritten) && x.memory().intact())
        << "written beside the rows";
  }
  kernels::AttentionArgs arguments_;  ///< of the last `attend`
};

/// Keys and values in ragged rows as well, and gradients.
struct RaggedRows : RaggedBatch {
  OutputGradients padded_gradients;
  Ragged key, value, dout;
  Tensor dlogsumexp, dquery, dkey, dvalue, dslopes, dsinks;

  RaggedRows(Call call, uint64_t number)
      : RaggedBatch(std::move(call), number),
        padded_gradients(random_gradients(rng, c)),
        key(rng, c.key, sequences.keys, sequences.used),
        value(rng, c.value, sequences.keys, sequences.used),
        dout(rng, padded_gradients.out, sequences.queries, sequences.queries),
        dlogsumexp(compute_storage_of(c.dtype),
                   {1, 1, s.H, query.starts.back()}) {
    for (int64_t b = 0; b < s.B; ++b) {
      for_each_index({1, 1, s.H, sequences.queries[b]}, [&](const Index& i) {
        dlogsumexp.set({0, 0, i[2], query.starts[b] + i[3]},
                       padded_gradients.logsumexp.get({0, b, i[2], i[3]}));
      });
    }
  }

  /// Forward and backward; returns the plan of forward.
  kernels::Plan run(const Variant& variant) {
    const kernels::Plan plan =
        attend(variant, key.argument(), value.argument());
    dquery = query.empty(rng, c.query.storage(), s.H, s.D);
    dkey = key.empty(rng, c.key.storage(), s.G, s.D);
    dvalue = key.empty(rng, c.key.storage(), s.G, s.Dv);
    kernels::BackwardArgs b;
    b.attention = arguments_;
    b.out = query.of(out);
    b.dout = dout.argument();
    b.logsumexp = logsumexp.data();
    b.dlogsumexp = dlogsumexp.data();
    b.dquery = query.out_of(dquery);
    b.dkey = key.out_of(dkey);
    b.dvalue = key.out_of(dvalue);
    const auto of_heads = [&](const Tensor& rule, Tensor& x) -> double* {
      if (rule.empty()) return nullptr;
      x = output(Storage::kFloat64, {1, 1, s.B, s.H});
      return static_cast<double*>(x.data());
    };
    b.dalibi_slopes = of_heads(c.slopes, dslopes);
    b.dsinks = of_heads(c.sinks, dsinks);
    run_backward(variant, b, running);
    for (const Tensor* x : {&dquery, &dkey, &dvalue}) expect_clean(*x);
    return plan;
  }

  OutputGradients output_gradients_of(int64_t n) const {
    return {query.part_of(dout.rows, n), query.part_of(dlogsumexp, n, 3)};
  }
  GradientResult gradients_of(int64_t n) const {
    const auto of_heads = [&](const Tensor& x) {
      return x.empty() ? Tensor() : slice(x, 2, n, 1);
    };
    return {query.part_of(dquery, n), key.part_of(dkey, n),
            key.part_of(dvalue, n),   {},
            of_heads(dslopes),        of_heads(dsinks)};
  }
};

/// Keys and values in pages.
struct PagedBatch : RaggedBatch {
  Pages pages;
  Tensor key, value;

  PagedBatch(Call call, uint64_t number)
      : RaggedBatch(std::move(call), number),
        pages(rng, sequences.used,
              pick<int64_t>(rng, {1, 5, 16, 64, 256, 257})),
        key(pages.pool_of(rng, c.key, sequences.used)),
        value(pages.pool_of(rng, c.value, sequences.used)) {}

  kernels::Plan run(const Variant& variant) {
    return attend(variant, pages.argument(key), pages.argument(value));
  }
};

}  // namespace kernel_test
