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


MEMORY_LENGTHS = [600, 3, 44]


def encoded(batch_first):
    """An encoder's output, and what blocks its padding."""
    memory = torch.randn(3, max(MEMORY_LENGTHS), E)
    padding = torch.arange(memory.shape[1]) >= torch.tensor(MEMORY_LENGTHS)[:, None]
    return memory if batch_first else memory.transpose(0, 1), padding


@KINDS
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["two tensors", "one tensor"])
def test_cross_attention_projects_keys_once(kind, batch_first, shared):
    """The bits of each call are those of the same call without a cache."""
    module, groups, width = module_of(kind, batch_first=batch_first)
    memory, padding = encoded(batch_first)
    keys = (memory, memory if shared else memory.roll(1, -1))
    cache = multihead.KVCache(3, groups, width)
    with torch.no_grad():
        assert module.append_to_cache(cache, *keys, padding) is None
        held = cache.clone()
        multihead.reset_stats()
        for length, average in ((1, True), (5, True), (1, False), (40, True)):
            x = torch.randn(3, length, E)
            x = x if batch_first else x.transpose(0, 1)
            options = dict(average_attn_weights=average)
            out, weights = module(x, None, None, cache=cache, **options)
            expected = module(x, *keys, padding, **options)
            assert torch.equal(out, expected[0])
            assert torch.equal(weights, expected[1])
            alone = module(x, None, None, cache=cache, need_weights=False)
            assert torch.equal(alone[0], out) and alone[1] is None
        assert multihead.stats().calls("fused", "module") == 12
    assert cache.lengths().tolist() == MEMORY_LENGTHS
    for row, length in enumerate(MEMORY_LENGTHS):
        for ours, before in ((cache.key(), held.key()), (cache.value(), held.value())):
            assert torch.equal(ours[row, :, :length], before[row, :, :length])


@KINDS
def test_cross_attention_by_the_definition(kind):
    module, groups, width = module_of(kind)
    if kind == "separate":
        pytest.skip("under exact PyTorch reads out_proj.weight, which this lacks")
    memory, padding = encoded(False)
    cache, x = multihead.KVCache(3, groups, width), torch.randn(2, 3, E)
    with torch.no_grad(), multihead.backend("exact"):
        module.append_to_cache(cache, memory, memory, padding)
        out, _ = module(x, None, None, need_weights=False, cache=cache)
        assert_close(out, module(x, memory, memory, padding)[0])


def test_keys_of_their_own_width():
    torch.manual_seed(4)
    widths = dict(kdim=20, vdim=28, batch_first=True)
    key, value, x = torch.randn(2, 9, 20), torch.randn(2, 9, 28), torch.randn(2, 3, E)
    for module, groups in (
        (multihead.MultiheadAttention(E, H, **widths), H),
        (multihead.GroupedQueryAttention(E, H, G, **widths), G),
    ):
        cache = multihead.KVCache(2, groups, E // H)
        with torch.no_grad():
            for part in (slice(0, 4), slice(4, 9)):  # a stream of audio, say
                module.append_to_cache(cache, key[:, part], value[:, part])
            ours = module(x, None, None, cache=cache)[0]
            assert_close(ours, module(x, key, value)[0])


@KINDS
def test_a_step_of_cross_attention_compiles_once(kind):
    module, groups, width = module_of(kind, batch_first=True)
    memory, _ = encoded(True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def fill(cache, memory):
        module.append_to_cache(cache, memory, memory)

    def step(cache, x):
        return module(x, None, None, need_weights=False, cache=cache)[0]

    caches = [multihead.KVCache(3, groups, width, max_length=1000) for _ in range(2)]
    with torch.no_grad():
        torch.compile(fill, fullgraph=True, backend=backend)(caches[0], memory)
        fill(caches[1], memory)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for _ in range(3):
            x = torch.randn(3, 1, E)
            assert torch.equal(compiled(caches[0], x), step(caches[1], x))
    assert len(graphs) == 2


# name: (arguments of forward, its error, fragment of the message)
BAD_CROSS = {
    "one of two": (
        dict(key=torch.zeros(2, 3, E)),
        TypeError,
        "key and value must be two tensors, or None both, got one",
    ),
    "causal": (
        dict(is_causal=True),
        ValueError,
        "forward with a cache: is_causal must be False where key is None, got True",
    ),
    "padding": (
        dict(key_padding_mask=torch.zeros(2, 3).bool()),
        ValueError,
        "forward: key_padding_mask must be None where key is None",
    ),
    "nothing held": (
        dict(empty=True),
        ValueError,
        "cache must hold tokens where key is None: see append_to_cache, got an empty",
    ),
    "another batch": (
        dict(query=torch.zeros(1, 3, E)),
        RuntimeError,
        "cache must have the batch of query, 1, and the layer's 6 key heads of width 8, "
        r"got keys \(2, 6, 4, 8\)",
    ),
    "no query": (dict(query=None), TypeError, "query must be a tensor, got None"),
    "another width of query": (
        dict(query=torch.zeros(2, 3, E + 1)),
        AssertionError,
        "embedding dimension of 48, but got 49",
    ),
    "another type of key": (
        dict(key=3),
        TypeError,
        "forward: key must be a tensor or None, got 3",
    ),
}


@pytest.mark.parametrize("name", BAD_CROSS)
def test_errors_of_cross_attention(name):
    change, error, text = BAD_CROSS[name]
    module, groups, width = module_of("mha", batch_first=True)
    cache = multihead.KVCache(2, groups, width)
    arguments = dict(query=X, key=None, value=None, cache=cache) | change
    with torch.no_grad():
        if not arguments.pop("empty", False):
            module.append_to_cache(cache, torch.ones(2, 4, E), torch.ones(2, 4, E))
        with pytest.raises(error, match=text):
            module(**arguments)
        with pytest.raises(TypeError, match="key must be a tensor, got None"):
            module(X, None, None)


# name: (arguments of append_to_cache, its error, fragment of the message)
BAD_APPEND = {
    "no key": (dict(key=None), TypeError, "key must be a tensor, got None"),
    "no tensor": (dict(value=3), TypeError, "value must be a tensor, got 3"),
    "no cache": (dict(cache=None), TypeError, "cache must be .* got None"),
    "unbatched": (
        dict(key=torch.zeros(3, E), value=torch.zeros(3, E)),
        RuntimeError,
        r"key must be batched \(3-D\), got \(3, 48\)",
    ),
    "fewer values": (
        dict(value=torch.zeros(2, 2, E)),
        AssertionError,
        "does not match value shape",
    ),
    "padding on the left": (
        dict(key_padding_mask=torch.tensor([[True, False, False]] * 2)),
        ValueError,
        "key_padding_mask must block the last tokens",
    ),
    "too many": (
        dict(key=torch.zeros(2, 9, E), value=torch.zeros(2, 9, E)),
        ValueError,
        "at most max_length tokens, 8",
    ),
}


@pytest.mark.parametrize("name", BAD_APPEND)
def test_errors_of_append_to_cache_write_nothing(name):
    change, error, text = BAD_APPEND[name]
    module, groups, width = module_of("mha", batch_first=True)
    cache = multihead.KVCache(2, groups, width, max_length=8)
    x = torch.zeros(2, 3, E)
    named = error in (TypeError, ValueError) and name != "too many"
    with (
        torch.no_grad(),
        pytest.raises(error, match="append_to_cache: " * named + text),
    ):
        module.append_to_cache(**dict(cache=cache, key=x, value=x) | change)
    assert cache.lengths().tolist() == [0, 0]


def test_append_to_cache_refuses_gradients():
    module, groups, width = module_of("gqa", batch_first=True)
    cache = multihead.KVCache(2, groups, width)
    with pytest.raises(RuntimeError, match="append_to_cache: no .* torch.no_grad"):
        module.append_to_cache(cache, X, X)
    assert len(cache) == 0


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
        "attn_mask must be None, since what a token sees follows from the cache",
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
