# SPDX-License-Identifier: MIT
"""Which masks of transformers are known as rules, and the growable cache beside
transformers' own."""

import copy
import subprocess
import sys

import pytest
import torch
from small_models import make, tokens, transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.cache_utils import DynamicCache

import multihead.integrations.transformers as on_multihead

FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "both": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "around": masking_utils.sliding_window_bidirectional_mask_function(2),
}


class Layer(nn.Module):
    is_causal = False


# Lq, Lk, and at which positions they begin: whole sequences, a step and a chunk with a
# cache, a static cache with room behind, a cache that has dropped its beginning.
SHAPES = {
    "whole": (7, 7, 0, 0),
    "step": (1, 9, 8, 0),
    "chunk": (4, 9, 5, 0),
    "static": (4, 12, 0, 0),
    "static step": (1, 12, 5, 0),
    "static chunk": (3, 12, 5, 0),
    "sliding": (1, 4, 9, 6),
    "sliding chunk": (3, 6, 9, 6),
    "cross": (4, 9, 0, 0),
}


def paddings(seen: int) -> dict[str, Tensor | None]:
    left, right = torch.ones(2, 2, seen, dtype=torch.bool)
    left[0, : min(2, seen - 1)] = False
    right[0, seen - 1 :] = False
    return {
        "none": None,
        "nothing": torch.ones_like(left),
        "left": left,
        "right": right,
    }


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", ["none", "nothing", "left", "right"])
@pytest.mark.parametrize("offset", [int, torch.tensor])
def test_rules_are_the_mask(
    function: str, shape: str, padding: str, offset: type
) -> None:
    lq, lk, q_offset, kv_offset = SHAPES[shape]
    seen = lk + kv_offset if function == "both" else q_offset + lq
    arguments = dict(
        batch_size=2,
        q_length=lq,
        kv_length=lk,
        q_offset=offset(q_offset),
        kv_offset=kv_offset,
        mask_function=FUNCTIONS[function],
        attention_mask=paddings(max(seen, 2))[padding],
        allow_is_causal_skip=function in ("causal", "window"),
        allow_is_bidirectional_skip=function in ("both", "around"),
    )
    mask = on_multihead._mask(**arguments)
    never = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    ordinary = masking_utils.sdpa_mask(**arguments | never)

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 8) for n in (lq, lk, lk))
    call = (Layer(), query, key, value)
    out, weights = on_multihead._attention(*call, mask, output_attentions=True)
    theirs, expected = on_multihead._attention(*call, ordinary, output_attentions=True)
    assert torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(out, theirs, atol=1e-6)
    assert ((weights > 0) <= ordinary).all()
    if mask is not None:
        assert isinstance(mask, on_multihead.RuleMask) and mask.rules is not None
        assert mask.shape == ordinary.shape and torch.equal(
            mask.logical_or(mask), ordinary
        )
    else:
        assert ordinary.all()


def test_what_becomes_a_rule() -> None:
    def rules(function: str, lq: int, lk: int, q_offset: int = 0, **others: object):
        mask = on_multihead._mask(
            2, lq, lk, q_offset, mask_function=FUNCTIONS[function], **others
        )
        return None if mask is None else mask.rules

    assert rules("causal", 7, 7) == {"is_causal": True}
    assert rules("causal", 1, 7, 6) is None
    assert rules("causal", 3, 7, 4) == {
        "is_causal": True,
        "causal_alignment": "bottom_right",
    }
    assert rules("window", 7, 7) == {"is_causal": True, "window": (2, 0)}
    assert rules("window", 3, 3) == {"is_causal": True}
    skip = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
    assert rules("both", 7, 7, **skip) is None
    assert rules("around", 7, 7, **skip) == {"window": (2, 2)}
    assert rules("around", 3, 3, **skip) is None
    assert rules("both", 7, 7) == {}
    found = rules("causal", 1, 9, 4)
    assert found.pop("query_offset") == 4 and found == {"is_causal": True}


@pytest.mark.parametrize(
    "function",
    {
        "another": lambda b, h, q, k: k <= q,
        "causal and more": masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda b, h, q, k: k > 1
        ),
        "three": masking_utils.and_masks(
            masking_utils.sliding_window_overlay(3),
            masking_utils.causal_mask_function,
            masking_utils.bidirectional_mask_function,
        ),
        "either": masking_utils.or_masks(
            masking_utils.causal_mask_function, lambda b, h, q, k: k < 3
        ),
        "chunks": masking_utils.chunked_causal_mask_function(
            3, torch.zeros(2, dtype=torch.int64)
        ),
        "packed": masking_utils.packed_sequence_compatibility_function(
            masking_utils.causal_mask_function,
            torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1),
            torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, -1),
        ),
    }.values(),
)
def test_everything_else_is_a_mask(function: object) -> None:
    arguments = dict(
        batch_size=2,
        q_length=6,
        kv_length=6,
        mask_function=function,
        allow_is_causal_skip=False,
    )
    mask = on_multihead._mask(**arguments)
    assert isinstance(mask, on_multihead.RuleMask) and mask.rules is None
    assert torch.equal(mask.formed(), masking_utils.sdpa_mask(**arguments))


def test_no_mask_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a padded forward, nor with any cache, while tokens are the same."""
    on_multihead.register()
    model, inputs = make("mistral")
    model.set_attn_implementation("multihead")
    monkeypatch.setattr(on_multihead.RuleMask, "formed", lambda mask: pytest.fail())
    options = dict(max_new_tokens=8, do_sample=False)
    model(**inputs)
    model.generate(**inputs, **options)
    model.generate(**inputs, **options, cache_implementation="static")


def test_packed_sequences() -> None:
    """Positions that begin anew separate sequences: transformers' mask says so."""
    on_multihead.register()
    model, _ = make("llama")
    first, second = tokens(1, 5), tokens(1, 7)
    apart = torch.cat([model(x).logits for x in (first, second)], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    model.set_attn_implementation("multihead")
    packed = model(
        torch.cat([first, second], dim=1), position_ids=positions, use_cache=False
    ).logits
    assert torch.allclose(packed, apart, atol=1e-5)


# ---- A mask that is not formed ----------------------------------------------


def rule_mask() -> on_multihead.RuleMask:
    padding = torch.ones(2, 4, dtype=torch.bool)
    padding[0, 0] = False
    mask = on_multihead._mask(2, 4, 4, attention_mask=padding)
    assert isinstance(mask, on_multihead.RuleMask)
    return mask


def change_by_item(mask: Tensor) -> None:
    mask[:, :, 2] = False


def change_by_operator(mask: Tensor) -> None:
    mask &= torch.tensor([True, True, False, True])


def change_by_view(mask: Tensor) -> None:
    mask[..., 1].logical_not_()


@pytest.mark.parametrize("change", [change_by_item, change_by_operator, change_by_view])
def test_changed_masks(change) -> None:
    ordinary, mask = rule_mask().formed(), rule_mask()
    change(ordinary)
    change(mask)
    assert mask.rules is None and torch.equal(mask.formed(), ordinary)
    query = torch.randn(2, 2, 4, 8)
    ours, theirs = (
        on_multihead._attention(Layer(), query, query, query, x)[0]
        for x in (mask, ordinary)
    )
    assert torch.equal(ours, theirs)


def test_read_masks() -> None:
    ordinary = rule_mask().formed()
    assert torch.equal(~rule_mask(), ~ordinary)
    assert torch.equal(
        torch.where(rule_mask(), 0.0, -1.0), torch.where(ordinary, 0.0, -1.0)
    )
    assert torch.equal(rule_mask()[:, :, :, :2], ordinary[:, :, :, :2])
    mask = rule_mask()
    assert mask.contiguous() is mask and mask.rules is not None
    assert (mask.shape, mask.dtype, mask.ndim) == (ordinary.shape, torch.bool, 4)
    assert repr(mask).startswith("RuleMask((2, 1, 4, 4), {'key_mask': ")


def test_added_masks() -> None:
    """Attention of a model's own would take True for a score of 1, and not say so."""
    scores = torch.randn(2, 2, 4, 4)
    for add in (lambda x: scores + x, lambda x: scores.clone().add_(x)):
        with pytest.raises(RuntimeError, match='choose attn_implementation="eager"'):
            add(rule_mask())
    mask = rule_mask()
    assert torch.equal(mask + mask, mask.formed())


def test_a_model_with_attention_of_its_own() -> None:
    on_multihead.register()
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        attention_type="original_full",
    )
    model = transformers.BigBirdPegasusModel._from_config(
        config, attn_implementation="multihead"
    )
    padding = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(RuntimeError, match="attention of its own"):
        model(tokens(1, 4), attention_mask=padding, decoder_input_ids=tokens(1, 2))


def test_keys_of_another_length() -> None:
    """Rules say where queries stand among the keys of the mask, not among others."""
    query, key = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(RuntimeError):
        on_multihead._attention(Layer(), query, key, key, rule_mask())


# ---- Caches -----------------------------------------------------------------

KINDS = {"full": {}, "sliding": dict(sliding_window=6)}


def caches(kind: str) -> tuple[DynamicCache, DynamicCache]:
    config = transformers.MistralConfig(
        num_hidden_layers=2, **{"sliding_window": None} | KINDS[kind]
    )
    theirs = DynamicCache(config=config)
    ours = on_multihead.GrowableCache(config)
    assert [type(layer).__name__ for layer in theirs.layers] != [
        type(layer).__name__ for layer in ours.layers
    ]
    return ours, theirs


def both(pair: tuple[DynamicCache, ...], *lengths: int, batch: int = 2) -> None:
    """Updates both by the same keys and values, and compares what they say."""
    for length in lengths:
        new = [torch.randn(batch, 3, length, n) for n in (4, 5)]
        for layer in range(2):
            assert pair[0].get_mask_sizes(length, layer) == pair[1].get_mask_sizes(
                length, layer
            )
            found = [cache.update(*new, layer) for cache in pair]
            for ours, theirs in zip(*found, strict=True):
                assert torch.equal(ours, theirs)
        same(pair)


def same(pair: tuple[DynamicCache, ...]) -> None:
    assert pair[0].get_seq_length() == pair[1].get_seq_length()
    for ours, theirs in zip(*(cache.layers for cache in pair), strict=True):
        if theirs.is_initialized and theirs.get_seq_length() > 0:
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cache_operations(kind: str) -> None:
    torch.manual_seed(0)
    pair = caches(kind)
    both(pair, 3, *[1] * 20, 5, 1)
    for cache in pair:
        cache.reorder_cache(torch.tensor([1, 1]))
    same(pair)
    both(pair, 1, 1, 4, 1)
    for cache in pair:
        cache.batch_repeat_interleave(3)
    both(pair, 1, 1, batch=6)
    for cache in pair:
        cache.batch_select_indices(torch.tensor([0, 4]))
    both(pair, 1, 1, 2)
    for cache in pair:
        cache.reset()
    same(pair)
    both(pair, 1, 7, 1, 1, batch=3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_beams_move_inside_of_the_room(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_multihead, "_PART", 400)  # two keys
    pair = caches(kind)
    both(pair, 9, 1, batch=4)
    place = pair[0].layers[0].keys.untyped_storage().data_ptr()
    for order in ([1, 0, 2, 3], [3, 3, 0, 0], [0, 1, 2, 3], [1, 2, 3, 0]):
        for cache in pair:
            cache.reorder_cache(torch.tensor(order))
        same(pair)
    assert pair[0].layers[0].keys.untyped_storage().data_ptr() == place
    both(pair, 1, batch=4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_crop(kind: str) -> None:
    pair = caches(kind)
    for cache in pair:
        cache.activate_past_recording()
    both(pair, 4, 1, 1, 3)
    for removed in (-2, 0, -1):
        for cache in pair:
            cache.crop(removed)
        both(pair, 1, 2)


@torch.no_grad()
def test_copies_are_apart() -> None:
    cache, _ = caches("full")
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 0)
    cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), 0)
    other, before = copy.deepcopy(cache), cache.layers[0].keys.clone()
    for which in (cache, other):
        which.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), 0)
    assert torch.equal(cache.layers[0].keys[:, :, :4], before)
    assert not torch.equal(cache.layers[0].keys, other.layers[0].keys)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_is_copied_while_there_is_room(kind: str) -> None:
    cache, _ = caches(kind)
    places, new = set(), torch.randn(1, 2, 1, 4)
    for _ in range(64):
        keys, _ = cache.update(new, new, 0)
        places.add(keys.untyped_storage().data_ptr())
    # Twice as much each time, or once in a window's length.
    assert len(places) <= {"full": 7, "sliding": 16}[kind]


def test_cache_with_gradients() -> None:
    cache, _ = caches("full")
    x = torch.randn(1, 2, 1, 4, requires_grad=True)
    total = sum(cache.update(x * i, x * i, 0)[0].square().sum() for i in range(4))
    total.backward()
    expected = torch.autograd.grad(
        sum((x * j).square().sum() for i in range(4) for j in range(i + 1)), x
    )
    assert torch.allclose(x.grad, expected[0])


def test_cache_of_another_mode() -> None:
    """A prefix from inference_mode, continued where its tensors cannot be written."""
    pair = caches("full")
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        with mode:
            both(pair, 3, 1, 1, 1)
            for cache in pair:
                cache.reorder_cache(torch.tensor([1, 0]))
            same(pair)


@torch.no_grad()
def test_cache_without_configuration() -> None:
    pair = on_multihead.GrowableCache(), DynamicCache()
    both(pair, 3, 1, 1)


# ---- Import -----------------------------------------------------------------


def test_import_is_asked_for() -> None:
    code = "import sys, multihead; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "change, said",
    [
        ("sys.modules['transformers'] = None", "import of transformers halted"),
        (
            "import transformers; transformers.__version__ = '5.9.1'",
            "transformers 5.9.1",
        ),
    ],
)
def test_absent_or_old(change: str, said: str) -> None:
    code = f"""
import sys
import multihead

{change}
try:
    import multihead.integrations.transformers
except ImportError as error:
    assert "needs transformers 5.23 or newer: pip install" in str(error)
    assert "{said}" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
