// SPDX-License-Identifier: MIT
//
// Ragged rows and pages: random sequences one after the other, on every
// instruction set, have the bits that each of them has alone, forward and
// backward. Memory ends with the last row that exists, what no sequence has is
// NaN, and what is written beside a row is seen.
#include "tests/cpp/kernels/gradients.h"

namespace kernel_test {
namespace {

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
  /// Bits of what x has of sequence b.
  std::vector<uint64_t> bits_of(const Tensor& x, int64_t b) const {
    const Index& sizes = x.sizes();
    Tensor part(x.storage(),
                {1, sizes[1], starts[b + 1] - starts[b], sizes[3]});
    for_each_index(part.sizes(), [&](const Index& i) {
      memcpy(part.at(i), x.at({0, i[1], starts[b] + i[2], i[3]}),
             bytes_of(x.storage()));
    });
    return part.bits();
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

std::vector<int64_t> random_lengths(Rng& rng,
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
Tensor part_of(const Tensor& x, int64_t b, int64_t rows, int64_t used) {
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

  Sequences(Dtype dtype, uint64_t number, Rng& rng)
      : padded(random_call(dtype, number)) {
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

void run_forward(const Variant& variant, const kernels::ForwardArgs& arguments,
                 const Running& running) {
  std::optional<Guarded> workspace;
  kernels::run_forward(
      variant.kernels, arguments, running.threads,
      [&](size_t bytes) { return workspace.emplace(bytes, Edge::kEnd).data(); },
      [&](const auto& kernel, const auto& given, const kernels::Plan& plan) {
        run_tasks(kernel, given, plan, running);
      });
}

void run_backward(const Variant& variant,
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

/// The sequences of a batch in rows and in pages, and what is computed of them.
struct RaggedBatch {
  Rng rng;
  Sequences sequences;
  const Call& c = sequences.padded;
  Shape s = c.shape;
  Storage lse_storage = compute_storage_of(c.dtype);
  Running running;
  OutputGradients gradients;
  Ragged query, key, value, dout;
  Tensor dlse;
  Pages pages;
  Tensor key_pool, value_pool;

  Tensor out, lse, out_of_pages, dquery, dkey, dvalue, dslopes, dsinks;

  RaggedBatch(Dtype dtype, uint64_t number)
      : rng(number),
        sequences(dtype, number, rng),
        running{.threads = number % 4 == 0 ? 3 : 1},
        gradients(random_gradients(rng, c)),
        query(rng, c.query, sequences.queries, sequences.queries),
        key(rng, c.key, sequences.keys, sequences.used),
        value(rng, c.value, sequences.keys, sequences.used),
        dout(rng, gradients.out, sequences.queries, sequences.queries),
        dlse(lse_storage, {1, 1, s.H, query.starts.back()}),
        pages(rng, sequences.used, pick<int64_t>(rng, {1, 5, 16, 64})),
        key_pool(pages.pool_of(rng, c.key, sequences.used)),
        value_pool(pages.pool_of(rng, c.value, sequences.used)) {
    for (int64_t b = 0; b < s.B; ++b) {
      for_each_index({1, 1, s.H, sequences.queries[b]}, [&](const Index& i) {
        dlse.set({0, 0, i[2], query.starts[b] + i[3]},
                 gradients.logsumexp.get({0, b, i[2], i[3]}));
      });
    }
  }

  void run(const Variant& variant) {
    out = query.empty(rng, c.query.storage(), s.H, s.Dv);
    lse = output(lse_storage, dlse.sizes());
    out_of_pages = query.empty(rng, c.query.storage(), s.H, s.Dv);
    kernels::ForwardArgs f{sequences.arguments(), query.out_of(out),
                           lse.data()};
    f.attention.query = query.argument();
    f.attention.key = key.argument();
    f.attention.value = value.argument();
    run_forward(variant, f, running);
    differentiate(variant, f.attention);
    f.attention.key = pages.argument(key_pool);
    f.attention.value = pages.argument(value_pool);
    f.out = query.out_of(out_of_pages);
    f.logsumexp = nullptr;
    run_forward(variant, f, running);
    for (const Tensor* x : {&out, &out_of_pages, &dquery, &dkey, &dvalue}) {
      EXPECT_TRUE(x->gaps_hold(kUnwritten) && x->memory().intact())
          << "written beside the rows";
    }
  }

  void differentiate(const Variant& variant,
                     const kernels::AttentionArgs& attention) {
    dquery = query.empty(rng, c.query.storage(), s.H, s.D);
    dkey = key.empty(rng, c.key.storage(), s.G, s.D);
    dvalue = key.empty(rng, c.key.storage(), s.G, s.Dv);
    dslopes = output(Storage::kFloat64, {1, 1, s.B, s.H});
    dsinks = output(Storage::kFloat64, {1, 1, s.B, s.H});
    kernels::BackwardArgs b;
    b.attention = attention;
    b.out = query.of(out);
    b.dout = dout.argument();
    b.logsumexp = lse.data();
    b.dlogsumexp = dlse.data();
    b.dquery = query.out_of(dquery);
    b.dkey = key.out_of(dkey);
    b.dvalue = key.out_of(dvalue);
    const auto data = [](const Tensor& rule, const Tensor& gradient) {
      return rule.empty() ? nullptr : static_cast<double*>(gradient.data());
    };
    b.dalibi_slopes = data(c.slopes, dslopes);
    b.dsinks = data(c.sinks, dsinks);
    run_backward(variant, b, running);
  }

  /// Sequence n is what it is alone.
  void judge(const Variant& variant, int64_t n) const {
    const int64_t rows = sequences.queries[n];
    const Call one = sequences.alone(n);
    const Result result = forward(variant, one);
    expect_same_bits("out", query.bits_of(out, n), result.out.bits());
    expect_same_bits("out of pages", query.bits_of(out_of_pages, n),
                     result.out.bits());
    OutputGradients by{part_of(gradients.out, n, rows, rows),
                       Tensor(lse_storage, {1, 1, s.H, rows})};
    by.logsumexp.fill([&](const Index& i) {
      EXPECT_EQ(lse.get({0, 0, i[2], query.starts[n] + i[3]}),
                result.logsumexp.get({0, 0, i[2], i[3]}));
      return gradients.logsumexp.get({0, n, i[2], i[3]});
    });
    const GradientResult g = backward(variant, one, result, by);
    expect_same_bits("dquery", query.bits_of(dquery, n), g.query.bits());
    expect_same_bits("dkey", key.bits_of(dkey, n), g.key.bits());
    expect_same_bits("dvalue", key.bits_of(dvalue, n), g.value.bits());
    for (int64_t h = 0; h < s.H; ++h) {
      if (!g.slopes.empty()) {
        EXPECT_EQ(dslopes.get({0, 0, n, h}), g.slopes.get({0, 0, 0, h}));
      }
      if (!g.sinks.empty()) {
        EXPECT_EQ(dsinks.get({0, 0, n, h}), g.sinks.get({0, 0, 0, h}));
      }
    }
  }
};

class RaggedRows : public testing::TestWithParam<Dtype> {};

TEST_P(RaggedRows, HaveTheBitsOfEachSequenceAlone) {
  for (uint64_t number = 0; number < 100; ++number) {
    RaggedBatch batch(GetParam(), number);
    SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                 description(batch.c));
    for (const Variant& variant : variants(GetParam())) {
      SCOPED_TRACE(variant.name);
      batch.run(variant);
      for (int64_t n = 0; n < batch.s.B; ++n) {
        SCOPED_TRACE("sequence " + std::to_string(n));
        batch.judge(variant, n);
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtype, RaggedRows, testing::ValuesIn(kAllDtypes),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace kernel_test
