# SPDX-License-Identifier: MIT
"""Models of transformers on these kernels: under the name "multihead", and as they are
under multihead.installed(). Every test sees in multihead.stats() which way its calls
went."""

import contextlib
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import multihead

from small_models import (  # isort: skip: asks for transformers first
    FAMILIES,
    GENERATING,
    logits_of,
    make,
    transformers,
)

import multihead.integrations.transformers as on_multihead

WAYS = ("multihead", "installed")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    on_multihead.register()


@contextlib.contextmanager
def all_fused(model: nn.Module, way: str) -> Iterator[None]:
    """Runs the model this way, and asserts that every call ran on the kernels."""
    name, source = {
        "multihead": ("multihead", "function"),
        "installed": ("sdpa", "installed"),
    }[way]
    model.set_attn_implementation(name)
    install = multihead.installed() if way == "installed" else contextlib.nullcontext()
    multihead.reset_stats()
    with install:
        yield
    stats = multihead.stats()
    assert stats.calls("fused", source) == stats.calls() > 0, stats


def skip_refused(name: str, way: str) -> None:
    if way == "installed" and FAMILIES[name].refuses_sdpa:
        pytest.skip(
            f"transformers runs {name} on no implementation that calls PyTorch's"
        )


def assert_as_close(
    ours: Iterable[Tensor], eager: Iterable[Tensor], exact: Iterable[Tensor]
) -> None:
    """Attention in float64 in a model in float32 is the measure, the norm of all errors
    together the error: the largest of them is a matter of luck. Ours is at most twice
    that of eager attention, and one rounding; over 8 seeds it was up to 1.5 times it."""
    ours, eager, exact = (
        torch.cat([x.detach().double().flatten() for x in tensors])
        for tensors in (ours, eager, exact)
    )
    limit = 2 * (eager - exact).norm() + torch.finfo(torch.float32).eps * exact.norm()
    assert (ours - exact).norm() <= limit


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, way: str) -> None:
    skip_refused(name, way)
    model, inputs = make(name)
    with torch.no_grad():
        eager = logits_of(model, inputs)
        with all_fused(model, way):
            ours = logits_of(model, inputs)
        model.set_attn_implementation("exact")
        exact = logits_of(model, inputs)
    assert_as_close([ours], [eager], [exact])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name: str, way: str) -> None:
    skip_refused(name, way)
    model, inputs = make(name)
    model.train()
    eager = gradients(model, inputs)
    with all_fused(model, way):
        ours = gradients(model, inputs)
    model.set_attn_implementation("exact")
    exact = gradients(model, inputs)
    assert exact.keys() == ours.keys() == eager.keys()
    assert_as_close(ours.values(), eager.values(), exact.values())


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    logits = logits_of(model, inputs)
    torch.manual_seed(1)
    (logits * torch.randn(logits.shape).to(logits)).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("way", WAYS)
def test_training_with_dropout(way: str) -> None:
    model, inputs = make("gpt2")
    model.train()
    for module in model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.5
    without = logits_of(make("gpt2")[0], inputs)
    with all_fused(model, way):
        found = gradients(model, inputs)
        assert all(gradient.isfinite().all() for gradient in found.values())
        torch.manual_seed(2)
        logits = logits_of(model, inputs)
        torch.manual_seed(2)
        assert torch.equal(logits, logits_of(model, inputs))
        assert (logits - without).abs().max() > 0.01
        model.eval()
        assert torch.allclose(without, logits_of(model, inputs), atol=1e-5)


# ---- Generation -------------------------------------------------------------


def growable(model: nn.Module) -> object:
    cache = on_multihead.GrowableCache(model.config)
    if not model.config.is_encoder_decoder:
        return cache
    return transformers.EncoderDecoderCache(
        cache, transformers.DynamicCache(config=model.config)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["dynamic", "static", "growable"])
@pytest.mark.parametrize("name", GENERATING)
def test_generate(name: str, cache: str, way: str) -> None:
    skip_refused(name, way)
    model, inputs = make(name)
    eager = generate(model, inputs)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    if cache == "growable":
        options["past_key_values"] = growable(model)
    with all_fused(model, way):
        assert torch.equal(generate(model, inputs, **options), eager)


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: object) -> Tensor:
    inputs = {
        name: x for name, x in inputs.items() if not name.startswith("decoder_input")
    }
    # Without repetitions, into which random models fall, whatever they attend to.
    rules = dict(min_new_tokens=16, max_new_tokens=16, no_repeat_ngram_size=1)
    return model.generate(**inputs, do_sample=False, **rules, **options)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beams(name: str) -> None:
    model, inputs = make(name)
    eager = generate(model, inputs, num_beams=3)
    with all_fused(model, "multihead"):
        cache = growable(model)
        ours = generate(model, inputs, num_beams=3, past_key_values=cache)
    assert torch.equal(ours, eager)


# ---- Returned weights -------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_weights(name: str) -> None:
    model, inputs = make(name)
    eager = weights_of(model, inputs)
    model.set_attn_implementation("multihead")
    multihead.reset_stats()
    ours = weights_of(model, inputs)
    stats = multihead.stats()
    assert stats.calls("fused") == stats.calls() > 0, stats
    assert eager.keys() == ours.keys() and eager
    for kind, layers in eager.items():
        assert len(layers) == len(ours[kind])
        for theirs, weights in zip(layers, ours[kind], strict=True):
            assert torch.allclose(weights, theirs, atol=1e-6, rtol=1e-5)


def weights_of(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Per kind and layer, (B, H, Lq, Lk), rows of padding as zeros: eager attention
    writes there what nobody should read."""
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    kinds = [name for name in outputs if name.endswith("attentions")]
    mask = inputs.get("attention_mask")
    rows = None if mask is None else mask.bool()[:, None, :, None]
    return {
        kind: [
            weights
            if rows is None or rows.shape[2] != weights.shape[2]
            else weights * rows
            for weights in outputs[kind]
        ]
        for kind in kinds
    }


def test_weights_after_dropout() -> None:
    """The weights that were used: they give the output."""
    model, _ = make("llama")
    layer = model.model.layers[0].self_attn.train()
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    arguments = (layer, query, key, value, None, 0.5)
    out, weights = on_multihead._attention(*arguments, output_attentions=True)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    assert 0.3 < (weights == 0)[..., seen].float().mean() < 0.7
    used = weights @ value.repeat_interleave(2, dim=1)
    assert torch.allclose(out, used.transpose(1, 2), atol=1e-6)
    out, weights = on_multihead._attention(*arguments)
    assert weights is None


def test_weights_by_configuration() -> None:
    """A configuration asks for all calls; transformers lets an eager model say so."""
    model, inputs = make("gpt2")
    model.config.output_attentions = True
    model.set_attn_implementation("multihead")
    assert model(**inputs).attentions[0].shape == (2, 4, 12, 12)


# ---- What there is beside ---------------------------------------------------


@pytest.mark.parametrize("rule", ["block_indices", "block_table", "indices", "sinks"])
def test_unknown_rules(rule: str) -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(
        ValueError, match=f"{rule} must be None, got Tensor: Linear passes on"
    ):
        on_multihead._attention(nn.Linear(1, 1), x, x, x, None, **{rule: x})
    on_multihead._attention(nn.Linear(1, 1), x, x, x, None, **{rule: None})


@pytest.mark.parametrize("way", WAYS)
def test_checkpointing(way: str) -> None:
    model, inputs = make("mistral")
    model.train()
    eager = gradients(model, inputs)
    model.activation_checkpointing_enable()
    with all_fused(model, way):
        ours = gradients(model, inputs)
    scale = max(gradient.abs().max().item() for gradient in eager.values())
    for name, gradient in eager.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "t5"])
def test_compiled(name: str) -> None:
    """One graph; what is traced has the masks of "sdpa"."""
    model, inputs = make(name)
    eager = logits_of(model, inputs)
    model.set_attn_implementation("multihead")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    multihead.reset_stats()
    with torch.no_grad():
        ours = logits_of(compiled, inputs)
    stats = multihead.stats()
    assert stats.calls("fused") == stats.calls() > 0, stats
    assert torch.allclose(ours, eager, atol=1e-5)


def test_compiled_generation_with_a_static_cache() -> None:
    """The mask is made outside of the graph, and is an input of it."""
    model, inputs = make("llama")
    eager = generate(model, inputs)
    model.set_attn_implementation("multihead")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    ours = generate(model, inputs, cache_implementation="static")
    assert torch.equal(ours, eager)


def test_bfloat16() -> None:
    model, inputs = make("gemma2")
    model.bfloat16()
    with torch.no_grad():
        eager = logits_of(model, inputs)
        with all_fused(model, "multihead"):
            ours = logits_of(model, inputs)
        model.set_attn_implementation("exact")
        exact = logits_of(model, inputs)
    assert_as_close([ours], [eager], [exact])
