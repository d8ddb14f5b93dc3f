// SPDX-License-Identifier: MIT
#include "cli/bench/case.h"

#include <array>

#include "cli/bench/targets.h"
#include "cli/cases/calls.h"
#include "multihead/kernels/kernels.h"

namespace cli {

const IsaFacts& facts_of(const std::string& isa) {
  using enum Family;
  static constexpr IsaFacts kFacts[] = {
      {"portable", false, kOther, {"default", "SSE4_2", "SSE41"}},
      {"avx2", false, kAvx2, {"avx2", "AVX2", "AVX2"}},
      {"avx512", false, kAvx512, {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"avx512_bf16",
       true,
       kAvx512,
       {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"amx", false, kAmx, {}},
  };
  static constexpr IsaFacts kUnknown = {"", false, kOther, {}};
  for (const IsaFacts& facts : kFacts)
    if (isa == facts.name) return facts;
  return kUnknown;
}

int vector_bits(const std::string& isa) {
  for (const auto& info : multihead::kernels::kIsas)
    if (isa == info.name) return info.vector_bits;
  return 128;
}

namespace {

// --- What the lists below are written with -----------------------------------

using Cases = std::vector<BenchCase>;

constexpr std::array kWidths = {at::kFloat, at::kBFloat16};

// B1 H8, Lq = Lk = L.
AttentionCall square(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype, bool is_causal = false) {
  AttentionCall call{.name = std::move(name),
                     .B = 1,
                     .H = 8,
                     .Lq = L,
                     .Lk = L,
                     .D = D,
                     .dtype = dtype};
  call.options.is_causal = is_causal;
  return call;
}

// Named after the call and its sizes: "causal d64 L512 f32".
BenchCase& add(Cases& cases, std::string group, const AttentionCall& call,
               Target target = {}) {
  std::string name = c10::str(call.name, " d", call.D, " L", call.Lq);
  if (call.Lk != call.Lq) name += c10::str("x", call.Lk);
  return cases.emplace_back(
      BenchCase{.group = std::move(group),
                .name = name + " " + short_name(call.dtype),
                .call = call,
                .target = std::move(target)});
}

// --- Forward ----------------------------------------------------------------

void add_squares(Cases& cases) {
  for (const at::ScalarType dtype : kWidths)
    for (const bool causal : {false, true})
      for (const int64_t D : {64, 128})
        for (const int64_t L : {128, 512, 1024, 2048, 4096}) {
          const AttentionCall call =
              square(causal ? "causal" : "full", L, D, dtype, causal);
          BenchCase& test =
              add(cases, dtype == at::kFloat ? "float32" : "bfloat16", call);
          test.full_only = L == 4096;
          test.headline = D == 64 && (L == 512 || L == 2048);
        }
}

void add_short(Cases& cases) {
  for (const at::ScalarType dtype : kWidths) {
    AttentionCall call = square("512 heads", 64, 64, dtype);
    call.B = 64;
    add(cases, "short", call).cold = true;
    call = square("96 heads", 196, 64, dtype);  // a vision transformer's
    call.H = 12;
    call.B = 8;
    add(cases, "short", call);
  }
}

void add_dropout(Cases& cases) {
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t D : {64, 128}) {
      AttentionCall call = square("dropout 0.1", 1024, D, dtype);
      call.options.dropout_p = 0.1;
      add(cases, "dropout", call).headline = dtype == at::kFloat && D == 64;
    }
}

void add_grouped(Cases& cases) {
  for (const at::ScalarType dtype : kWidths) {
    AttentionCall call =
        square("grouped 32/8 causal", 1024, 128, dtype, /*is_causal=*/true);
    call.H = 32;
    call.G = 8;
    call.options.enable_gqa = true;
    add(cases, "grouped", call).headline = true;
  }
}

void add_masks(Cases& cases) {
  for (const at::ScalarType dtype : kWidths) {
    AttentionCall half = square("half-masked keys", 2048, 64, dtype);
    half.B = 4;
    half.mask = CallMask::kHalfKeys;
    add(cases, "masks", half).headline = dtype == at::kFloat;

    AttentionCall tril = square("tril as a tensor", 2048, 64, dtype);
    tril.B = 4;
    tril.mask = CallMask::kTriangle;
    add(cases, "masks", tril);

    AttentionCall bias = square("bias", 1024, 64, dtype);
    bias.mask = CallMask::kFloat;
    add(cases, "masks", bias);

    AttentionCall window = square("window 512", 4096, 64, dtype);
    window.options.window = {{511, 0}};
    add(cases, "masks", window).headline = true;

    AttentionCall lengths = square("key lengths", 1024, 64, dtype);
    lengths.B = 4;
    lengths.key_lengths = true;
    lengths.shortest = 256;
    add(cases, "masks", lengths);
  }
}

void add_head_widths(Cases& cases) {
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t D : {32, 40, 48, 96})
      for (const int64_t L : {512, 1024, 2048, 4096})
        add(cases, "head widths", square("full", L, D, dtype)).full_only =
            L != 1024;
}

void add_layouts(Cases& cases) {
  for (const at::ScalarType dtype : kWidths)
    for (const bool causal : {false, true}) {
      AttentionCall call = square(causal ? "(B,L,H,D) causal" : "(B,L,H,D)",
                                  1024, 64, dtype, causal);
      call.layout = Layout::kSequenceMajor;
      add(cases, "layout", call).full_only = causal;
    }
}

void add_other_dtypes(Cases& cases) {
  for (const at::ScalarType dtype : {at::kHalf, at::kDouble})
    for (const int64_t L : {512, 1024})
      for (const bool causal : {false, true})
        add(cases, "other dtypes",
            square(causal ? "causal" : "full", L, 64, dtype, causal))
            .full_only = dtype == at::kDouble || L == 512;
}

void add_few_queries(Cases& cases) {
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t Lq : {1, 4, 16, 64}) {
      AttentionCall call = square("few queries", Lq, 128, dtype);
      call.Lk = 4096;
      BenchCase& test = add(cases, "few queries", call);
      test.cold = test.memory_bound = true;
      test.full_only = Lq == 4 || Lq == 64;
    }
}

// One query for each head: what a step of generation costs. Grouped heads leave
// PyTorch's fused path, so its time also forms the repeated keys.
void add_decoding(Cases& cases) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t Lk : {4096, 32768}) {
      AttentionCall call = square("decode 32/8", 1, 128, dtype);
      call.H = 32;
      call.G = 8;
      call.Lk = Lk;
      call.options.enable_gqa = true;
      BenchCase& test = add(cases, "decode", call);
      test.cold = test.memory_bound = true;
      test.full_only = Lk == 32768 || dtype == at::kHalf;
    }
  }
  const auto add_short = [&](std::string name, int64_t H, int64_t G) {
    for (const at::ScalarType dtype : kWidths)
      for (const int64_t Lk : {16, 128, 512}) {
        AttentionCall call = square(name, 1, 64, dtype);
        call.H = H;
        call.G = G;
        call.Lk = Lk;
        call.options.enable_gqa = G != H;
        add(cases, "decode", call).full_only =
            dtype != at::kFloat || H != 8 || G != 8;
      }
  };
  add_short("decode", 8, 8);
  add_short("decode 12/12", 12, 12);
  add_short("decode 32/8", 32, 8);
}

// The same step with a KVCache, and with one that is narrower than query.
void add_cached(Cases& cases) {
  constexpr auto kFloat = at::kFloat, kBFloat16 = at::kBFloat16;
  for (const auto& [dtype, storage] : {std::pair(kFloat, kFloat),
                                       {kBFloat16, kBFloat16},
                                       {at::kHalf, at::kHalf},
                                       {kFloat, kBFloat16},
                                       {kFloat, at::kChar},
                                       {kBFloat16, at::kChar}})
    for (const int64_t Lk : {4096, 32768}) {
      const bool narrow = storage != dtype;
      const std::string stored = short_name(storage);
      BenchCase test{
          .group = narrow ? "stored" : "cache",
          .name = c10::str(narrow ? stored + " under " : "cache ",
                           short_name(dtype), " 32/8 d128 L1x", Lk),
          .call = CachedCall{.H = 32,
                             .G = 8,
                             .Lk = Lk,
                             .D = 128,
                             .dtype = dtype,
                             .storage = storage},
          .full_only = narrow ? Lk == 4096 : Lk == 32768 || dtype == at::kHalf,
          .cold = true,
          .memory_bound = !narrow};
      if (narrow) test.target.ratios = {{Implementation::kWide, 1.6}};
      cases.push_back(std::move(test));
    }
}

// A chunk of a prompt, or draft tokens: never slower than one by one.
void add_extending(Cases& cases) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t Lq : {4, 16, 64}) {
      AttentionCall call =
          square("extend 32/8", Lq, 128, dtype, /*is_causal=*/true);
      call.H = 32;
      call.G = 8;
      call.Lk = 4096;
      call.options.enable_gqa = true;
      call.options.causal_alignment = multihead::CausalAlignment::kBottomRight;
      BenchCase& test = add(cases, "extend", call,
                            {.ratios = {{Implementation::kSeparate, 1}}});
      test.cold = true;
      test.full_only = dtype == at::kHalf || Lq == 64;
    }
}

// Eight sequences. Against padded ones, whose queries see as many keys as the
// sequence has, a step shall take the share of the pairs, within 10 %.
void add_ragged(Cases& cases) {
  const std::vector<int64_t> lengths{64, 128, 256, 384, 512, 768, 1024, 2048};
  double pairs = 0, padded = 0;
  for (const int64_t n : lengths) {
    pairs += static_cast<double>(n * n);
    padded += static_cast<double>(n * lengths.back());
  }
  for (const at::ScalarType dtype : kWidths)
    for (const Pass pass : {Pass::kForward, Pass::kBoth}) {
      const bool trains = pass == Pass::kBoth;
      Target target{.ratios = {{Implementation::kSeparate, 1}}};
      if (trains)
        target.ratios = {{Implementation::kPadded, padded / pairs / 1.1}};
      cases.push_back(
          {.group = "ragged",
           .name = c10::str(trains ? "ragged, both ways, d64 " : "ragged d64 ",
                            short_name(dtype)),
           .call =
               RaggedCall{.lengths = lengths, .H = 8, .D = 64, .dtype = dtype},
           .pass = pass,
           .target = std::move(target),
           .full_only = trains || dtype == at::kBFloat16,
           .one_thread = trains});
    }
}

void add_paged(Cases& cases) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t Lk : {4096, 32768})
      for (const int64_t page : {16, 64, 256})
        cases.push_back(
            {.group = "paged",
             .name = c10::str("pages of ", page, " d128 L1x", Lk, " ",
                              short_name(dtype)),
             .call = PagedCall{.H = 32,
                               .G = 8,
                               .Lk = Lk,
                               .D = 128,
                               .page = page,
                               .dtype = dtype},
             .target = {.ratios = {{Implementation::kContiguous, 1 / 1.1}}},
             .full_only = Lk == 32768 || page == 64 || dtype == at::kHalf,
             .cold = true,
             .memory_bound = true});
}

void add_modules(Cases& cases) {
  const auto add = [&](std::string name, const LayerCall& call) -> BenchCase& {
    return cases.emplace_back(
        BenchCase{.group = "modules", .name = std::move(name), .call = call});
  };
  LayerCall call{.N = 8, .Lq = 512, .E = 512, .H = 8, .inputs = Inputs::kSelf};
  add("averaged weights", call).headline = true;
  call.need_weights = false;
  add("no weights", call).headline = true;
  call.mask = LayerMask::kCausalHint;
  add("causal", call).headline = true;

  LayerCall small{.N = 3, .Lq = 4, .E = 8, .H = 2, .inputs = Inputs::kSelf};
  small.batch_first = false;
  for (const bool weights : {false, true}) {
    small.need_weights = weights;
    add(weights ? "small call, weights" : "small call", small);
  }
}

// --- Backward, and training steps --------------------------------------------

void add_backward(Cases& cases) {
  const auto add_square = [&](int64_t L, int64_t D, at::ScalarType dtype,
                              bool causal) {
    const AttentionCall call =
        square(causal ? "causal backward" : "backward", L, D, dtype, causal);
    BenchCase& test = add(cases, "backward", call);
    test.pass = Pass::kBackward;
    // With all threads, one length stands for the others.
    test.one_thread = L != 1024;
    test.headline = D == 64 && L == 1024;
    // Its targets are those of L = 1024.
    test.full_only = L == 2048 && dtype == at::kBFloat16 && !causal;
  };
  for (const at::ScalarType dtype : kWidths)
    for (const bool causal : {false, true})
      for (const int64_t L : {512, 1024, 2048})
        add_square(L, 64, dtype, causal);
  add_square(1024, 128, at::kFloat, /*causal=*/false);
}

void add_both_ways(Cases& cases) {
  const auto add_both = [&](const AttentionCall& call) -> BenchCase& {
    BenchCase& test = add(cases, "forward + backward", call);
    test.pass = Pass::kBoth;
    test.one_thread = true;
    return test;
  };
  for (const int64_t L : {1024, 2048}) {
    AttentionCall call = square("dropout 0.1, both ways", L, 64, at::kFloat);
    call.options.dropout_p = 0.1;
    BenchCase& test = add_both(call);
    test.target.memory = 5;
    test.headline = L == 1024;
  }
  AttentionCall window = square("window 512, both ways", 4096, 64, at::kFloat);
  window.options.window = {{511, 0}};
  add_both(window).headline = true;

  AttentionCall head = square("one head, both ways", 4096, 64, at::kFloat);
  head.H = 1;
  BenchCase& test = add_both(head);
  test.target.scaling = 1.8;
  test.one_thread = false;
}

void add_steps(Cases& cases) {
  const auto add = [&](std::string name, auto call) {
    cases.push_back({.group = "training steps",
                     .name = std::move(name),
                     .call = call,
                     .pass = Pass::kBoth,
                     .one_thread = true,
                     .headline = true});
  };
  LayerCall layer{.N = 8, .Lq = 512, .E = 512, .H = 8, .inputs = Inputs::kSelf};
  add("step, weights returned", layer);
  layer.need_weights = false;
  add("step, no weights", layer);
  layer.mask = LayerMask::kCausalHint;
  add("step, causal", layer);
  add("step, GPT-2 block, dropout 0.1",
      BlockCall{.N = 1, .L = 1024, .E = 768, .H = 12, .dtype = at::kBFloat16});
}

}  // namespace

std::string name(Pass pass) {
  static constexpr const char* kNames[] = {"forward", "backward",
                                           "forward + backward"};
  return kNames[static_cast<int>(pass)];
}

std::string name(Implementation who) {
  static constexpr const char* kNames[] = {
      "ours",       "SDPA",       "by hand", "nn.MHA", "torch::nn", "fast path",
      "SDPA layer", "one by one", "padded",  "rows",   "KVCache",   "wide"};
  return kNames[static_cast<int>(who)];
}

bool is_ours(Implementation who) {
  using enum Implementation;
  return who == kOurs || who >= kSeparate;
}

std::vector<BenchCase> bench_cases(Family family) {
  Cases cases;
  for (const auto add_list :
       {add_squares, add_short, add_dropout, add_grouped, add_masks,
        add_head_widths, add_layouts, add_other_dtypes, add_few_queries,
        add_decoding, add_extending, add_ragged, add_paged, add_cached,
        add_modules})
    add_list(cases);
  for (BenchCase& test : cases)
    if (const auto* call = std::get_if<AttentionCall>(&test.call);
        call && call->Lq == call->Lk && call->Lq >= 1024)
      test.target.scaling = 1.9;
  add_backward(cases);
  add_both_ways(cases);
  add_steps(cases);
  for (BenchCase& test : cases) add_targets(family, test);
  return cases;
}

std::string shapes(const BenchCase& test) {
  return std::visit([](const auto& call) { return shapes(call); }, test.call);
}

at::ScalarType dtype_of(const BenchCase& test) {
  return std::visit([](const auto& call) { return call.dtype; }, test.call);
}

}  // namespace cli
