# SPDX-License-Identifier: MIT
"""Random configurations of torch.nn.MultiheadAttention, and how to run them.

A configuration is drawn from a seed alone, so that a failure is repeated by its
number and the C++ tests can be given the same cases.
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One call of a MultiheadAttention module, values aside."""

    seed: int
    dtype: torch.dtype
    embed_dim: int
    num_heads: int
    batch: int
    query_length: int
    key_length: int
    sharing: str  # "self": one tensor; "key is value"; "distinct"
    kdim: int | None
    vdim: int | None
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    batch_first: bool
    batched: bool
    layout: str  # "contiguous", "transposed", "gapped", "odd" (address)
    odd_parameters: bool  # they lie at odd addresses too
    attn_mask: str  # "none", "bool", "float"
    mask_rank: int
    padding: str  # "none", "bool", "float"
    hint: bool  # is_causal, with the causal mask
    mask_grad: bool
    need_weights: bool
    average: bool
    dropout: float
    training: bool
    grad: bool
    weights_in_loss: bool

    @property
    def options(self) -> dict:
        """The keyword arguments of the module's constructor."""
        return dict(
            dropout=self.dropout,
            bias=self.bias,
            add_bias_kv=self.add_bias_kv,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            dtype=self.dtype,
        )


def draw(seed: int, dtypes: tuple[torch.dtype, ...]) -> Configuration:
    """The configuration with this number."""
    r = random.Random(seed)
    native = r.random() < 0.25  # lean towards PyTorch's inference path
    num_heads = r.choice((2, 4, 8)) if native else r.randint(1, 8)
    head_dim = r.choice((1, 2, 3, 4, 5, 8, 12, 16, 32, 64))
    big = r.random() < 0.04
    longest = 300 if big else r.choice((20, 20, 20, 60))
    query_length = r.randint(1, longest)
    sharing = "self" if native else r.choice(("self", "key is value", "distinct"))
    separate = sharing == "distinct" and r.random() < 0.4
    kind = r.choice(("none", "none", "bool", "float"))
    hint = r.random() < 0.15
    kind = "bool" if hint else kind  # PyTorch warns of masks of two kinds
    grad = not native and r.random() < 0.6
    return Configuration(
        seed=seed,
        dtype=r.choice(dtypes),
        embed_dim=num_heads * head_dim,
        num_heads=num_heads,
        batch=r.randint(1, 2 if big else 12),
        query_length=query_length,
        key_length=query_length if sharing == "self" else r.randint(1, longest + 4),
        sharing=sharing,
        kdim=r.randint(1, 40) if separate else None,
        vdim=r.randint(1, 40) if separate and r.random() < 0.8 else None,
        bias=native or r.random() < 0.7,
        add_bias_kv=not native and r.random() < 0.2,
        add_zero_attn=not native and r.random() < 0.2,
        batch_first=native or r.random() < 0.5,
        batched=native or r.random() < 0.85,
        layout=r.choice(("contiguous", "contiguous", "transposed", "gapped", "odd")),
        odd_parameters=r.random() < 0.1,
        attn_mask=kind,
        mask_rank=2 if hint else r.choice((2, 3)),
        padding=r.choice(("none", "none", kind if kind != "none" else "bool")),
        hint=hint,
        mask_grad=grad and r.random() < 0.3,
        need_weights=r.random() < 0.6,
        average=r.random() < 0.5,
        dropout=r.choice((0.0, 0.0, 0.1, 0.5)),
        training=not native and r.random() < 0.6,
        grad=grad,
        weights_in_loss=r.random() < 0.5,
    )


def at_odd_address(x: Tensor) -> Tensor:
    """A contiguous copy, one element behind an aligned address."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    return storage[1:].view(x.shape).copy_(x)


def _sequence(c: Configuration, length: int, width: int) -> Tensor:
    sizes = (c.batch, length) if c.batch_first else (length, c.batch)
    sizes = (*sizes, width) if c.batched else (length, width)
    if c.layout == "transposed" and c.batched:
        x = torch.randn(sizes[1], sizes[0], width, dtype=c.dtype).transpose(0, 1)
    elif c.layout == "gapped":
        x = torch.randn(*sizes[:-1], width + 3, dtype=c.dtype)[..., :width]
    else:
        x = torch.randn(sizes, dtype=c.dtype)
    return at_odd_address(x) if c.layout == "odd" else x


def inputs(c: Configuration) -> tuple[list[Tensor], dict]:
    """(query, key, value) and the masks; tensors that are one stay one."""
    query = _sequence(c, c.query_length, c.embed_dim)
    if c.sharing == "self":
        sequences = [query, query, query]
    else:
        key = _sequence(c, c.key_length, c.kdim or c.embed_dim)
        value = (
            key
            if c.sharing == "key is value"
            else _sequence(c, c.key_length, c.vdim or c.embed_dim)
        )
        sequences = [query, key, value]
    masks = {}
    batch = c.batch if c.batched else 1
    shape = (c.query_length, c.key_length)
    if c.mask_rank == 3:
        shape = (batch * c.num_heads, *shape)
    if c.hint:
        masks["attn_mask"] = torch.ones(shape, dtype=torch.bool).triu(1)
    elif c.attn_mask == "bool":
        masks["attn_mask"] = torch.rand(shape) < 0.3
    elif c.attn_mask == "float":
        masks["attn_mask"] = torch.randn(shape, dtype=c.dtype)
    padding_shape = (c.batch, c.key_length) if c.batched else (c.key_length,)
    if c.padding == "bool":
        masks["key_padding_mask"] = torch.rand(padding_shape) < 0.3
    elif c.padding == "float":
        masks["key_padding_mask"] = torch.randn(padding_shape, dtype=c.dtype)
    return sequences, masks


def make(module_class: type[nn.MultiheadAttention], c: Configuration) -> nn.Module:
    """The module, with biases that are not 0."""
    torch.default_generator.manual_seed(c.seed)  # visits no devices: faster
    module = module_class(c.embed_dim, c.num_heads, **c.options)
    with torch.no_grad():
        for bias in (module.in_proj_bias, module.out_proj.bias):
            if bias is not None:
                bias.normal_()
        if c.odd_parameters:
            for parameter in module.parameters():
                parameter.data = at_odd_address(parameter)
    return module.train(c.training)


def run(
    module_class: type[nn.MultiheadAttention],
    c: Configuration,
    context: contextlib.AbstractContextManager | None = None,
) -> dict[str, Tensor | None]:
    """Outputs, gradients and the generator's final state, by name."""
    module = make(module_class, c)
    return forward_backward(module, c, *inputs(c), context)


def forward_backward(
    module: nn.Module,
    c: Configuration,
    sequences: list[Tensor],
    masks: dict[str, Tensor],
    context: contextlib.AbstractContextManager | None = None,
) -> dict[str, Tensor | None]:
    """What `run` returns, for a module and inputs that are there already."""
    if c.grad:
        for x in sequences:
            x.requires_grad_()
        mask = masks.get("attn_mask")
        if c.mask_grad and mask is not None and mask.is_floating_point():
            mask.requires_grad_()
    with torch.set_grad_enabled(c.grad), context or contextlib.nullcontext():
        out, weights = module(
            *sequences,
            **masks,
            need_weights=c.need_weights,
            average_attn_weights=c.average,
            is_causal=c.hint,
        )
    results = {"out": out, "weights": weights}
    if c.grad:
        loss = out.float().square().sum()
        if weights is not None and c.weights_in_loss:
            loss = loss + weights.float().square().sum()
        loss.backward()
        for name, x in zip(("query", "key", "value"), sequences, strict=True):
            results[f"{name}.grad"] = x.grad
        for name, x in masks.items():
            results[f"{name}.grad"] = x.grad
        for name, parameter in module.named_parameters():
            results[f"{name}.grad"] = parameter.grad
    results["generator"] = torch.get_rng_state()
    return results


def differences(ours: dict, theirs: dict) -> Iterator[str]:
    """What is not the same in bits, dtype, shape or strides; NaN equals NaN."""
    for name, b in theirs.items():
        a = ours[name]
        if a is None or b is None:
            if a is not b:
                yield f"{name}: {type(a).__name__} against {type(b).__name__}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}"
        elif not torch.equal(a.isnan(), b.isnan()) or not torch.equal(
            a.nan_to_num(0.0), b.nan_to_num(0.0)
        ):
            yield f"{name}: {(a.double() - b.double()).abs().max():.2e} apart"
        elif name == "out" and a.stride() != b.stride():
            yield f"{name}: strides {a.stride()} against {b.stride()}"
