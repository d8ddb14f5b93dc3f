# SPDX-License-Identifier: MIT
"""forward(cache=): the modules decode, and say what a cache cannot take."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import multihead

E, H, G = 48, 6, 2
KINDS = pytest.mark.parametrize("kind", ["mha", "separate", "gqa", "wide heads"])


def module_of(kind, **options):
    torch.manual_seed(3)
    if kind in ("mha", "separate"):
        # Widths of their own would say other inputs; weights of their own do not.
        module = multihead.MultiheadAttention(E, H, **options)
        if kind == "separate":
            module.out_proj = nn.Sequential(module.out_proj)
        groups, width = H, E // H
    else:
        width = 16 if kind == "wide heads" else E // H
        module = multihead.GroupedQueryAttention(E, H, G, head_dim=width, **options)
        groups = G
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module.eval(), groups, width


def in_chunks(module, x, cache, sizes, **options):
    dim = 1 if module.batch_first else 0
    return torch.cat(
        [module(a, a, a, cache=cache, **options)[0] for a in x.split(sizes, dim)], dim
    )


@KINDS
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("backend", ["auto", "fused", "exact"])
def test_decoding_is_prefill(kind, batch_first, backend):
    module, groups, width = module_of(kind, batch_first=batch_first)
    if backend == "exact" and kind == "separate":
        pytest.skip("under exact PyTorch reads out_proj.weight, which this lacks")
    x = torch.randn(2, 530, E)
    x = x if batch_first else x.transpose(0, 1)
    with torch.no_grad(), multihead.backend(backend):
        expected, weights = module(x, x, x, is_causal=True)
        for max_length, sizes in ((None, [1, 1, 16, 505, 7]), (530, [200, 330])):
            cache = multihead.KVCache(2, groups, width, max_length=max_length)
            multihead.reset_stats()
            out = in_chunks(module, x, cache, sizes, need_weights=False)
            # Products of other numbers of rows round otherwise, as PyTorch's do.
            assert_close(out, expected)
            assert cache.lengths().tolist() == [530, 530]
            way = "definition" if backend == "exact" else "fused"
            assert multihead.stats().calls(way, "module") == len(sizes)
        if backend == "exact":
            return
        cache.truncate(100)
        last = x[:, 100:] if batch_first else x[100:]
        for average in (True, False):
            more = cache.clone()
            _, ours = module(last, last, last, cache=more, average_attn_weights=average)
            wanted = (
                weights
                if average
                else module(x, x, x, is_causal=True, average_attn_weights=False)[1]
            )
            assert_close(ours, wanted[..., 100:, :])


def test_the_bits_of_attention_are_those_of_prefill():
    """With weights of one 1 in each row, products round nothing: what is left is
    attention's, whose bits do not depend on the chunks."""
    module, groups, width = module_of("gqa", bias=False, batch_first=True)
    with torch.no_grad():
        for p in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
            p.weight.copy_(torch.eye(p.out_features, p.in_features))
        x = torch.randn(2, 1100, E)
        cache = multihead.KVCache(2, groups, width)
        expected = in_chunks(module, x, cache, [1100], need_weights=False)
        for sizes in ([1] * 1100, [512, 588], [7, 1, 600, 16, 15, 461]):
            for rows in (slice(None), slice(1, 2)):
                y = x[rows]
                cache = multihead.KVCache(len(y), groups, width)
                out = in_chunks(module, y, cache, sizes, need_weights=False)
                assert torch.equal(out, expected[rows])


@KINDS
def test_rows_of_their_own_length(kind):
    module, groups, width = module_of(kind, batch_first=True)
    x, new = torch.randn(3, 9, E), torch.randn(3, 1, E)
    lengths = [9, 4, 1]
    padding = torch.arange(9) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        cache = multihead.KVCache(3, groups, width)
        out = module(x, x, x, padding, need_weights=False, cache=cache)[0]
        assert cache.lengths().tolist() == lengths
        step = module(new, new, new, cache=cache)[0]
        for row, n in enumerate(lengths):
            y = torch.cat([x[row, :n], new[row]])[None]
            alone = module(y, y, y, is_causal=True)[0][0]
            assert_close(out[row, :n], alone[:n])
            assert_close(step[row, 0], alone[n])


def test_bfloat16_storage_under_float32():
    module, groups, width = module_of("gqa", batch_first=True)
    x = torch.randn(2, 40, E)
    with torch.no_grad():
        cache = multihead.KVCache(2, groups, width, dtype=torch.bfloat16)
        out = in_chunks(module, x, cache, [30, 10])
        assert cache.key().dtype == torch.bfloat16 and out.dtype == torch.float32
        assert not torch.equal(out, module(x, x, x, is_causal=True)[0])
        # By hand, from what is stored.
        query = module.q_proj(x).unflatten(-1, (H, width)).transpose(1, 2)
        attended = multihead.scaled_dot_product_attention(
            query,
            cache.key().float(),
            cache.value().float(),
            is_causal=True,
            enable_gqa=True,
        )
        assert_close(out, module.out_proj(attended.transpose(1, 2).flatten(2)))


@KINDS
def test_a_step_compiles_once(kind):
    module, groups, width = module_of(kind, batch_first=True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    caches = [multihead.KVCache(2, groups, width, max_length=20) for _ in range(2)]
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(2, 1, E)
            ours = compiled(x, x, x, need_weights=False, cache=caches[0])[0]
            theirs = module(x, x, x, need_weights=False, cache=caches[1])[0]
            assert torch.equal(ours, theirs)
        with pytest.raises(ValueError, match="at most max_length"):
            compiled(x, x, x, need_weights=False, cache=caches[0])
    assert len(graphs) == 1


def test_through_inductor_or_aot():
    """The whole way of a compiled step but its code: functional and decomposed."""
    module, groups, width = module_of("gqa", batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    caches = [multihead.KVCache(2, groups, width, max_length=8) for _ in range(2)]
    with torch.no_grad():
        for size in (3, 1, 1):
            x = torch.randn(2, size, E)
            ours = compiled(x, x, x, need_weights=False, cache=caches[0])[0]
            theirs = module(x, x, x, need_weights=False, cache=caches[1])[0]
            assert torch.equal(ours, theirs)
    assert caches[0].lengths().tolist() == [5, 5]


X = torch.randn(2, 3, E)
HOLES = torch.tensor([[True, False, False], [False, False, False]])
# name: (options of the module, arguments, its error, fragment of the message)
BAD = {
    "attn_mask": (
        {},
        dict(attn_mask=torch.zeros(3, 3)),
        ValueError,
        "attn_mask must be None, since it is causal by itself",
    ),
    "padding on the left": (
        {},
        dict(key_padding_mask=HOLES),
        ValueError,
        "key_padding_mask must block the last tokens .* blocks earlier",
    ),
    "padding of numbers": (
        {},
        dict(key_padding_mask=torch.zeros(2, 3)),
        ValueError,
        r"key_padding_mask must .* got Float \(2, 3\)",
    ),
    "padding of another shape": (
        {},
        dict(key_padding_mask=HOLES[:, :2]),
        ValueError,
        r"key_padding_mask must .* \(2, 3\), got Bool \(2, 2\)",
    ),
    "fewer keys": (
        {},
        dict(key=X[:, :2], value=X[:, :2]),
        RuntimeError,
        "key must have as many tokens as query, 3, got 2",
    ),
    "unbatched": (
        {},
        dict(query=X[0], key=X[0], value=X[0]),
        RuntimeError,
        r"query must be batched \(3-D\), got \(3, 48\)",
    ),
    "another batch": (
        {},
        dict(query=X[:1], key=X[:1], value=X[:1]),
        RuntimeError,
        "append: key must have the shape",
    ),
    "no tensor": (
        {},
        dict(query=3),
        TypeError,
        "forward: query must be a tensor, got 3",
    ),
    "no cache": (
        {},
        dict(cache=[]),
        TypeError,
        "cache must be a multihead.KVCache or None, got list",
    ),
    "too many tokens": (
        {},
        dict(query=X.repeat(1, 3, 1), key=X.repeat(1, 3, 1), value=X.repeat(1, 3, 1)),
        ValueError,
        "at most max_length tokens, 8, in each row, got 9",
    ),
    "a bias as key": (
        dict(add_bias_kv=True),
        {},
        ValueError,
        "add_bias_kv and add_zero_attn must be False",
    ),
    "zeros as key": (
        dict(add_zero_attn=True),
        {},
        ValueError,
        "add_bias_kv and add_zero_attn must be False",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_write_nothing(name):
    options, arguments, error, text = BAD[name]
    module, groups, width = module_of("mha", batch_first=True, **options)
    cache = multihead.KVCache(2, groups, width, max_length=8)
    given = dict(query=X, key=X, value=X, cache=cache) | arguments
    with torch.no_grad(), pytest.raises(error, match=text):
        module(**given)
    assert cache.lengths().tolist() == [0, 0]


def test_under_autocast():
    module, groups, width = module_of("gqa", batch_first=True)
    x = torch.randn(2, 20, E)
    cache = multihead.KVCache(2, groups, width)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = in_chunks(module, x, cache, [15, 5], need_weights=False)
        expected = module(x, x, x, is_causal=True, need_weights=False)[0]
    assert out.dtype == expected.dtype == torch.bfloat16
    assert_close(out, expected)


def test_training_is_refused():
    module, groups, width = module_of("gqa", batch_first=True, dropout=0.1)
    cache = multihead.KVCache(2, groups, width)
    with pytest.raises(RuntimeError, match="must require gradients.* torch.no_grad"):
        module(X, X, X, cache=cache)
    module.train()
    with torch.no_grad(), pytest.raises(ValueError, match="dropout must be 0 or"):
        module(X, X, X, cache=cache)
    assert len(cache) == 0
