# SPDX-License-Identifier: MIT
"""The modules: parameters, state, what PyTorch does with them, and conversions."""

import asyncio
import copy
import itertools
import pickle
import threading

import pytest
import torch
from equal import assert_equal
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import multihead
from multihead import GroupedQueryAttention, MultiheadAttention

E, H, B, L, S = 24, 6, 2, 4, 5
MODES = pytest.mark.parametrize("mode", ["auto", "exact"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
CONSTRUCTORS = [
    dict(bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, **widths)
    for bias, bias_kv, zero, widths in itertools.product(
        (True, False),
        (True, False),
        (True, False),
        ({}, dict(kdim=E, vdim=E), dict(kdim=7), dict(vdim=9), dict(kdim=7, vdim=9)),
    )
]
EACH_CONSTRUCTOR = pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)


def seeded(module_class, *sizes, **options):
    torch.manual_seed(3)
    return module_class(*sizes, **options)


def blocked(*shape):
    """About a third of the keys, never the first one of a row."""
    mask = torch.rand(shape) < 0.35
    mask[..., 0] = False
    return mask


def same_parameters(ours, theirs):
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# --- MultiheadAttention as a torch.nn.MultiheadAttention -----------------------------


@DTYPES
@EACH_CONSTRUCTOR
def test_same_seed_same_parameters(options, dtype):
    ours = seeded(MultiheadAttention, E, H, **options, dtype=dtype)
    state = torch.get_rng_state()
    theirs = seeded(nn.MultiheadAttention, E, H, **options, dtype=dtype)
    assert same_parameters(ours, theirs)
    assert torch.equal(state, torch.get_rng_state())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, nn.MultiheadAttention)


@EACH_CONSTRUCTOR
def test_state_dict_both_ways(options):
    ours = MultiheadAttention(E, H, **options)
    theirs = nn.MultiheadAttention(E, H, **options)
    ours.load_state_dict(theirs.state_dict())
    assert same_parameters(ours, theirs)
    again = nn.MultiheadAttention(E, H, **options)
    again.load_state_dict(ours.state_dict())
    assert same_parameters(again, theirs)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "module",
    [
        MultiheadAttention(E, H, dropout=0.5, add_bias_kv=True).eval(),
        MultiheadAttention(E, H, kdim=E, vdim=E, bias=False, batch_first=True),
        GroupedQueryAttention(E, H, 2, head_dim=5, dropout=0.5).eval(),
    ],
    ids=["packed", "no bias", "grouped"],
)
def test_copies_are_equal_and_independent(module, duplicate):
    twin = duplicate(module)
    x = torch.randn(L, B, E)
    assert type(twin) is type(module)
    assert repr(twin) == repr(module)
    expected = module(x, x, x)
    assert_equal(twin(x, x, x), expected)
    nn.init.zeros_(twin.out_proj.weight)
    assert torch.equal(module(x, x, x)[0], expected[0])


@MODES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_inside_an_encoder_layer(grad, training, mode):
    def layer(ours):
        encoder = seeded(
            nn.TransformerEncoderLayer, E, H, 2 * E, batch_first=True, dropout=0.0
        )
        if ours:
            attention = MultiheadAttention(E, H, batch_first=True)
            attention.load_state_dict(encoder.self_attn.state_dict())
            encoder.self_attn = attention
        return encoder.train(training)

    x, padding = torch.randn(B, L, E), blocked(B, L)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    ours, theirs = layer(True), layer(False)
    with torch.set_grad_enabled(grad), multihead.backend(mode):
        for masks in (
            {},
            dict(src_key_padding_mask=padding),
            dict(src_mask=causal, is_causal=True),
        ):
            assert_close(ours(x, **masks), theirs(x, **masks))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_nested_tensors_go_where_pytorch_takes_them(mode):
    """On the inference path: each sequence by the kernels, or as PyTorch has it."""
    ours = seeded(MultiheadAttention, E, H, batch_first=True).eval()
    theirs = seeded(nn.MultiheadAttention, E, H, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(n, E) for n in (2, 4)])
    with torch.no_grad(), multihead.backend(mode):
        out, _ = ours(x, x, x, need_weights=False)
        expected, _ = theirs(x, x, x, need_weights=False)
    assert out.is_nested
    equal = assert_close if mode == "auto" else assert_equal
    for a, b in zip(out.unbind(), expected.unbind(), strict=True):
        equal(a, b)


@pytest.mark.parametrize(
    "module",
    [MultiheadAttention(E, H), GroupedQueryAttention(E, H, 2)],
    ids=["multi-head", "grouped"],
)
def test_hooks_run(module):
    module, x, seen = copy.deepcopy(module), torch.randn(L, B, E), []
    module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    module.register_forward_hook(lambda module, args, result: seen.append("after"))
    module.register_full_backward_hook(lambda *args: seen.append("backward"))
    module(x.requires_grad_(), x, x)[0].sum().backward()
    assert seen == ["before", "after", "backward"]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@MODES
@pytest.mark.parametrize("training", [True, False])
def test_parametrized_weights_are_used(training, mode):
    ours = seeded(MultiheadAttention, E, H).train(training)
    plain = copy.deepcopy(ours)
    with torch.no_grad():
        plain.out_proj.weight *= 2
        plain.in_proj_weight *= 2
    parametrize.register_parametrization(ours, "in_proj_weight", Doubled())
    parametrize.register_parametrization(ours.out_proj, "weight", Doubled())
    x = torch.randn(L, B, E)
    with multihead.backend(mode):
        assert_close(ours(x, x, x), plain(x, x, x))


# --- Masks ---------------------------------------------------------------------------

CAUSAL_LAYERS = [
    {},
    dict(add_bias_kv=True),
    dict(add_zero_attn=True),
    dict(add_bias_kv=True, add_zero_attn=True),
    dict(kdim=7, vdim=9),
]


@MODES
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("options", CAUSAL_LAYERS, ids=str)
def test_is_causal_alone_means_causal(options, padded, need_weights, grad, mode):
    """The same as the triangular mask written out, on every path."""
    module = MultiheadAttention(E, H, batch_first=True, **options).eval()
    x = torch.randn(B, L, E)
    key = torch.randn(B, S, module.kdim)
    value = torch.randn(B, S, module.vdim)
    inputs = [(x, key, value)] if options.get("kdim") else [(x, x, x), (x, key, value)]
    for query, key, value in inputs:
        length = key.size(1)
        triangle = torch.ones(L, length, dtype=torch.bool).triu(1)
        masks = dict(key_padding_mask=blocked(B, length)) if padded else {}
        masks["need_weights"] = need_weights
        with torch.set_grad_enabled(grad), multihead.backend(mode):
            ours = module(query, key, value, **masks, is_causal=True)
            written = module(query, key, value, **masks, attn_mask=triangle)
        assert_close(ours, written)


@pytest.mark.parametrize("options", CAUSAL_LAYERS, ids=str)
def test_causal_rows_do_not_see_the_future(options):
    module = MultiheadAttention(E, H, **options)
    x, key, value = (torch.randn(L, B, n) for n in (E, module.kdim, module.vdim))
    before, weights = module(x, key, value, is_causal=True)
    later = [torch.cat([t[:2], torch.randn_like(t[2:])]) for t in (key, value)]
    after, _ = module(x, *later, is_causal=True)
    assert_close(after[:2], before[:2])
    assert (after[2:] - before[2:]).abs().amax(-1).min() > 1e-3
    assert (weights[:, 0, 1:L] == 0).all()


# --- GroupedQueryAttention -----------------------------------------------------------

MASKS = {
    "none": {},
    "bool": dict(attn_mask=blocked(L, S)),
    "bool per head": dict(attn_mask=blocked(B * H, L, S)),
    "float": dict(attn_mask=torch.randn(L, S, dtype=torch.float64)),
    "float per head": dict(attn_mask=torch.randn(B * H, L, S, dtype=torch.float64)),
    "padding": dict(key_padding_mask=blocked(B, S)),
    "both": dict(attn_mask=blocked(L, S), key_padding_mask=blocked(B, S)),
    "causal": dict(is_causal=True),
}


def close(ours, theirs):
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@MODES
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, dict(kdim=7, vdim=9)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, H])
def test_grouped_equals_multihead_with_repeated_heads(groups, options, masks, mode):
    gqa = GroupedQueryAttention(E, H, groups, dropout=0.5, **options).double().eval()
    nn.init.normal_(gqa.k_proj.bias)
    nn.init.normal_(gqa.v_proj.bias)
    mha = nn.MultiheadAttention(E, H, dropout=0.5, **options).double().eval()
    mha.load_state_dict(gqa.to_multihead().state_dict())
    query, key, value = (
        torch.randn(n, B, width, dtype=torch.float64)
        for n, width in ((L, E), (S, gqa.kdim), (S, gqa.vdim))
    )
    ours = dict(MASKS[masks])
    theirs = dict(ours)
    if theirs.pop("is_causal", False):
        theirs["attn_mask"] = torch.ones(L, S, dtype=torch.bool).triu(1)
    for average, need_weights in ((True, True), (False, True), (True, False)):
        how = dict(average_attn_weights=average, need_weights=need_weights)
        with multihead.backend(mode):
            results = gqa(query, key, value, **ours, **how)
        close(results, mha(query, key, value, **theirs, **how))


@MODES
@pytest.mark.parametrize("head_dim", [None, 5])
def test_grouped_layouts(head_dim, mode):
    """Batch first and unbatched calls are the same function."""
    gqa = seeded(GroupedQueryAttention, E, H, 2, head_dim=head_dim).double()
    first = seeded(
        GroupedQueryAttention, E, H, 2, head_dim=head_dim, batch_first=True
    ).double()
    q, k = (torch.randn(n, B, E, dtype=torch.float64) for n in (L, S))
    with multihead.backend(mode):
        out, weights = gqa(q, k, k)
        turned, same = first(*(x.transpose(0, 1) for x in (q, k, k)))
        single, one = gqa(q[:, 1], k[:, 1], k[:, 1])
    assert out.shape == q.shape
    assert weights.shape == (B, L, S)
    assert gqa.q_proj.weight.shape == (H * (head_dim or E // H), E)
    close((turned.transpose(0, 1), same), (out, weights))
    close((single, one), (out[:, 1], weights[1]))


@pytest.mark.parametrize("need_weights", [True, False])
@DTYPES
def test_grouped_by_single_heads_has_the_bits_of_multihead(dtype, need_weights):
    """G = H, with kdim: nn.MultiheadAttention's separate weights and draws."""
    sizes = dict(kdim=7, vdim=9, dropout=0.3, dtype=dtype)
    gqa = seeded(GroupedQueryAttention, E, H, H, **sizes)
    mha = seeded(nn.MultiheadAttention, E, H, **sizes)
    for role in "qkv":
        weight = getattr(gqa, f"{role}_proj").weight
        assert torch.equal(weight, getattr(mha, f"{role}_proj_weight"))
    assert torch.equal(gqa.out_proj.weight, mha.out_proj.weight)
    inputs = [
        torch.randn(n, B, width, dtype=dtype) for n, width in ((L, E), (S, 7), (S, 9))
    ]
    with multihead.backend("exact"):
        torch.manual_seed(0)
        ours = gqa(*inputs, need_weights=need_weights)
    torch.manual_seed(0)
    theirs = mha(*inputs, need_weights=need_weights)
    assert_equal(ours, theirs)


def test_grouped_dropout_is_for_training_only():
    gqa = GroupedQueryAttention(E, H, 2, dropout=0.5)
    x = torch.randn(L, B, E)
    _, weights = gqa(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    _, weights = gqa.eval()(x, x, x, average_attn_weights=False)
    assert (weights > 0).all()


# --- Conversions ---------------------------------------------------------------------

LAYERS = [{}, dict(bias=False), dict(kdim=7, vdim=9), dict(batch_first=True)]


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_from_multihead_averages_heads(options):
    mha = nn.MultiheadAttention(E, H, **options).eval()
    if mha.in_proj_bias is not None:
        nn.init.normal_(mha.in_proj_bias)
    gqa = GroupedQueryAttention.from_multihead(mha, 2)
    packed = mha.in_proj_weight
    key_weight = mha.k_proj_weight if packed is None else packed[E : 2 * E]
    for group in range(2):
        heads = [key_weight[4 * h : 4 * h + 4] for h in range(3 * group, 3 * group + 3)]
        mean = (heads[0] + heads[1] + heads[2]) / 3
        assert_close(gqa.k_proj.weight[4 * group : 4 * group + 4], mean)
    if mha.in_proj_bias is not None:
        mean = mha.in_proj_bias[2 * E :].view(2, 3, 4).mean(1).flatten()
        assert_close(gqa.v_proj.bias, mean)
        assert torch.equal(gqa.q_proj.bias, mha.in_proj_bias[:E])
    assert torch.equal(gqa.out_proj.weight, mha.out_proj.weight)
    assert not gqa.training
    assert gqa.batch_first == mha.batch_first


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_conversions_there_and_back(options):
    mha = MultiheadAttention(E, H, dropout=0.1, **options)
    back = GroupedQueryAttention.from_multihead(mha, H).to_multihead()
    assert same_parameters(back, mha)
    assert (back.dropout, back.batch_first) == (mha.dropout, mha.batch_first)
    gqa = GroupedQueryAttention(E, H, 2, **options)
    repeated = GroupedQueryAttention.from_multihead(gqa.to_multihead(), 2)
    assert_close(dict(repeated.named_parameters()), dict(gqa.named_parameters()))
    nn.init.zeros_(repeated.out_proj.weight)
    assert (gqa.out_proj.weight != 0).any()


# --- The choice of backend -----------------------------------------------------------


def chosen():
    """The backend in force, read from what only "exact" does: a NaN row."""
    q = torch.ones(1, 1, 1, 2)
    x = torch.full((1, 1, 1, 2), float("nan"))
    hidden = torch.zeros(1, 1, dtype=torch.bool)
    out = multihead.scaled_dot_product_attention(q, x, x, hidden)
    return "exact" if out.isnan().any() else "auto"


def test_backend_blocks_nest():
    assert chosen() == "auto"
    with multihead.backend("exact"):
        assert chosen() == "exact"
        with multihead.backend("auto"):
            assert chosen() == "auto"
        assert chosen() == "exact"
    with pytest.raises(KeyError), multihead.backend("exact"):
        raise KeyError
    assert chosen() == "auto"


def test_backend_is_of_the_thread():
    seen = []
    with multihead.backend("exact"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert chosen() == "exact"
    assert seen == ["auto"]


def test_backend_is_of_the_task():
    async def task(name, mine, other):
        with multihead.backend(name):
            mine.set()
            await other.wait()
            return chosen()

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task("exact", a, b), task("auto", b, a))

    assert asyncio.run(both()) == ["exact", "auto"]
