# SPDX-License-Identifier: MIT
"""The same tokens with every cache of transformers, in every way of generating: alone,
padded, sampled, beams, with draft tokens, and in continuous batches on pages."""

import copy
import functools
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead

from small_models import make, transformers  # isort: skip: asks for transformers first

from transformers.generation.continuous_batching import model_runner

import multihead.integrations._transformers_paged as paged
import multihead.integrations.transformers as on_multihead

MODELS = ("llama", "gemma2", "gpt-oss")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    on_multihead.register()
    gc.freeze()  # every generate_batch collects garbage: 0.4 s of all that is loaded
    yield
    gc.unfreeze()


# ---- generate ---------------------------------------------------------------

NEW = 14
WITHOUT_REPETITION = dict(no_repeat_ngram_size=1)
WAYS: dict[str, dict[str, Any]] = {
    "sampled": dict(do_sample=True, temperature=2.0, top_k=20, **WITHOUT_REPETITION),
    "beams": dict(num_beams=3, num_return_sequences=2, **WITHOUT_REPETITION),
    "drafts": WITHOUT_REPETITION,  # of a model that is often wrong, so the cache is cropped
}


def generate(model: nn.Module, way: str, **options: Any) -> Tensor:
    inputs = {"input_ids": torch.arange(4, 20).view(2, 8) % 7 + 3}
    if way == "drafts":
        inputs["input_ids"] = inputs["input_ids"][:1]
        options["assistant_model"] = assistant(model.config.model_type)
    else:
        inputs["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
        inputs["attention_mask"][0, :3] = 0
    torch.manual_seed(5)
    rules = dict(do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW) | WAYS[way]
    return model.generate(**inputs, **rules, **options)


def assistant(kind: str) -> nn.Module:
    model, _ = make(kind.replace("_", "-"))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model


@functools.cache
def eager(name: str, way: str) -> Tensor:
    return generate(make(name)[0], way)


@pytest.mark.parametrize("cache", ["dynamic", "static", "growable"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, way: str, cache: str) -> None:
    """gemma2 and gpt-oss have sliding layers in all of them, shorter than the text."""
    if cache == "static" and way == "drafts":
        pytest.skip("transformers refuses draft tokens with a static cache")
    options: dict[str, Any] = {}
    model, _ = make(name)
    if cache == "static":
        options["cache_implementation"] = cache
    if cache == "growable":
        options["past_key_values"] = on_multihead.GrowableCache(model.config)
    model.set_attn_implementation("multihead")
    multihead.reset_stats()
    assert torch.equal(generate(model, way, **options), eager(name, way))
    stats = multihead.stats()
    assert stats.calls("fused", "function") == stats.calls()
    if way == "drafts":
        assert 4 < stats.calls() < 2 * NEW, "all or no drafts were accepted"
    else:
        assert stats.calls() == 2 * NEW


@pytest.mark.parametrize("way", ["sampled", "beams"])
def test_quantized_cache(way: str) -> None:
    """In float8, which needs no other library; it takes no sliding layers."""
    model, _ = make("llama")
    quantized = dict(cache_implementation="quantized", cache_config={"backend": "fp8"})
    expected = generate(model, way, **quantized)
    assert not torch.equal(expected, eager("llama", way))
    model.set_attn_implementation("multihead")
    multihead.reset_stats()
    assert torch.equal(generate(model, way, **quantized), expected)
    assert multihead.stats().calls("fused", "function") == 2 * NEW


# ---- Continuous batches -----------------------------------------------------


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


# Shorter than a page and longer, than the window and longer; two begin alike.
PROMPTS = [tokens(9, 0), tokens(40, 1), tokens(2, 2), tokens(40, 1)[:35] + [7, 8]]
NO_END = 1000  # a token that is never drawn
# By default all prompts come at once, and whole.
BATCHES: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": dict(max_batch_tokens=8, page_size=8),
    "one by one": dict(max_requests_per_batch=1),  # shares the pages of what is alike
}


def generate_batch(
    model: nn.Module, prompts: list[list[int]], do_sample: bool = False, **batch: Any
) -> tuple[list[list[int]], list[list[float]]]:
    """New tokens of each prompt, and their log probabilities."""
    batching = transformers.ContinuousBatchingConfig(
        **dict(num_blocks=200, page_size=16, max_batch_tokens=512) | batch,
        return_logprobs=True,
    )
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=do_sample, eos_token_id=NO_END, pad_token_id=0
    )
    torch.manual_seed(3)
    outputs = model.generate_batch(prompts, config, batching, warmup=False).values()
    assert [x.error for x in outputs] == [None] * len(prompts)
    return [x.generated_tokens for x in outputs], [x.logprobs for x in outputs]


@functools.cache
def eager_alone(name: str) -> tuple[list[list[int]], list[list[float]]]:
    """The same by generate, each prompt by itself."""
    model, _ = make(name)
    found: tuple[list[list[int]], list[list[float]]] = [], []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            eos_token_id=NO_END,
            max_new_tokens=NEW,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, len(prompt) :]
        logits = torch.cat(out.logits).log_softmax(-1)
        found[0].append(new.tolist())
        found[1].append(logits[torch.arange(NEW), new].tolist())
    return found


def assert_same(
    ours: tuple[list[list[int]], list[list[float]]],
    expected: tuple[list[list[int]], list[list[float]]],
) -> None:
    """1e-4: of log probabilities in float32, whose logits are sums of 64 products."""
    assert ours[0] == expected[0]
    for found, logs in zip(ours[1], expected[1], strict=True):
        for x, y in zip(found, logs, strict=True):
            assert math.isclose(x, y, abs_tol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "gpt2"])
def test_generate_batch(name: str, batch: str) -> None:
    model, _ = make(name)
    model.set_attn_implementation("multihead")
    multihead.reset_stats()
    assert_same(generate_batch(model, PROMPTS, **BATCHES[batch]), eager_alone(name))
    stats = multihead.stats()
    assert stats.calls("fused", "function") == stats.calls() >= 2 * NEW
    assert model.config._attn_implementation == "multihead"


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_as_eager_pages(name: str) -> None:
    """transformers' own way, which leaves out softcap: without gemma2."""
    model, _ = make(name)
    expected = generate_batch(model, PROMPTS)
    sampled = generate_batch(model, PROMPTS[:1], do_sample=True)
    model.set_attn_implementation("multihead")
    assert_same(generate_batch(model, PROMPTS), expected)
    assert_same(generate_batch(model, PROMPTS[:1], do_sample=True), sampled)


def in_double(module: nn.Module) -> None:
    """Its results are rounded once, so their bits do not depend on who is beside."""
    twin = copy.deepcopy(module).double()

    def cast(x: Any, dtype: torch.dtype) -> Any:
        if isinstance(x, tuple):
            return tuple(cast(part, dtype) for part in x)
        return x.to(dtype) if x.is_floating_point() else x

    def forward(*inputs: Tensor) -> Any:
        return cast(twin(*cast(inputs, torch.double)), torch.float)

    module.forward = forward


@pytest.mark.parametrize(
    "name, window, copied",
    [("llama", None, False), ("gemma2", 64, False), ("gpt-oss", 70, True)],
)
def test_bits(
    name: str, window: int | None, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request gets does not depend on the others, on pages, or on chunks. The
    window and the last prompt cross pages and splits. Steps of single tokens read all
    windows where they lie, of which pages are a part."""
    prompts = [*PROMPTS[:2], tokens(520, 4)]
    options = {} if window is None else {"sliding_window": window}
    model, _ = make(name, max_position_embeddings=1024, **options)
    if name == "gpt-oss":
        model.set_experts_implementation("eager")  # the others refuse float64
    model.set_attn_implementation("multihead")
    for module in list(model.modules()):
        if type(module).__name__.endswith(("Linear", "Experts", "Router")):
            in_double(module)
    together = generate_batch(model, prompts, max_batch_tokens=1024)
    chunks = generate_batch(model, prompts, max_batch_tokens=50, page_size=32)
    copies, copy_window = [], paged._copied
    monkeypatch.setattr(
        paged, "_copied", lambda *given: copies.append(1) or copy_window(*given)
    )
    alone = [
        generate_batch(model, [prompt], max_batch_tokens=1024) for prompt in prompts[1:]
    ]
    assert together == chunks
    assert bool(copies) == copied
    for i, (new, logs) in enumerate(alone, start=1):
        assert (new, logs) == ([together[0][i]], [together[1][i]])


def test_padded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers pads what it compiles; padding is not computed."""
    model, _ = make("gpt-oss")
    model.set_attn_implementation("multihead")
    given, computed = [], []
    with_padding, without = on_multihead.paged_attention, paged.varlen_attention

    def counting_all(cache: Any, layer: int, query: Tensor, *rest: Any, **rules: Any):
        given.append(query.shape[2])
        return with_padding(cache, layer, query, *rest, **rules)

    def counting_rows(query: Tensor, *rest: Any, **rules: Any) -> Tensor:
        computed.append(query.shape[0])
        return without(query, *rest, **rules)

    monkeypatch.setattr(on_multihead, "paged_attention", counting_all)
    monkeypatch.setattr(paged, "varlen_attention", counting_rows)
    always = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", always, raising=False)
    ours = generate_batch(model, PROMPTS, max_batch_tokens=128)
    assert_same(ours, eager_alone("gpt-oss"))
    rows = sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1)
    assert sum(computed) == 2 * rows < sum(given)


def test_positions_that_are_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that pass on none, or other ones: only bits depend on them."""
    model, _ = make("mistral")
    model.set_attn_implementation("multihead")
    begins = paged._begins
    for replaced in (None, torch.full((1, 512), -5)):
        monkeypatch.setattr(
            paged, "_begins", lambda _, *others, x=replaced: begins(x, *others)
        )
        assert_same(generate_batch(model, PROMPTS), eager_alone("mistral"))


def test_unknown_parts_of_a_cache() -> None:
    class Allocator:
        layer_type, index = "another_attention", 0

    class PagedCache:
        layer_to_allocator = {3: Allocator()}

    layer = nn.Linear(1, 1)
    layer.layer_idx = 3
    x = torch.randn(1, 2, 3, 8)
    expected = "a paged cache must be of full or sliding attention, got another_att"
    with pytest.raises(ValueError, match=expected):
        on_multihead._attention(layer, x, x, x, None, cache=PagedCache(), read_index=[])


def test_other_implementations_switch_as_before() -> None:
    model, _ = make("llama")
    model.set_attn_implementation("exact")
    with pytest.raises(ValueError, match="exact is not supported for continuous"):
        generate_batch(model, PROMPTS)
