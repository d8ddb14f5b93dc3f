# SPDX-License-Identifier: MIT
"""A projection that is no plain Linear is called, not read."""

import copy

import pytest
import torch
from equal import assert_equal
from paths import fused_calls
from torch import nn
from torch.testing import assert_close

import multihead

E, H, G = 16, 4, 2
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


class LoRA(nn.Linear):
    """A low-rank update beside the weight, as adapters are written by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T

    def merged(self) -> torch.Tensor:
        return self.weight + self.up @ self.down


def layer(**options):
    torch.manual_seed(0)
    return multihead.GroupedQueryAttention(E, H, G, batch_first=True, **options)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 3, E), torch.randn(2, 5, E), torch.randn(2, 5, E)


def masks():
    mask = torch.randn(2 * H, 3, 5)
    mask[:, :, 4] = -torch.inf
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    return {
        "none": {},
        "causal": dict(is_causal=True),
        "masks": dict(attn_mask=mask, key_padding_mask=padding),
        "without weights": dict(need_weights=False, key_padding_mask=padding),
        "per head": dict(average_attn_weights=False),
    }


@pytest.mark.parametrize("mode", ["auto", "exact", "fused"])
@pytest.mark.parametrize("masking", masks())
@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ("out_proj",), NAMES])
def test_lora_beside_a_projection_counts_and_trains(names, masking, mode):
    gqa, call = layer().double(), [x.double() for x in inputs()]
    adapted, options = copy.deepcopy(gqa), masks()[masking]
    for name in names:
        lora = LoRA(getattr(gqa, name)).double()
        setattr(adapted, name, lora)
        getattr(gqa, name).weight = nn.Parameter(lora.merged().detach())
    with multihead.backend(mode):
        got, expected = adapted(*call, **options), gqa(*call, **options)
        assert_close(got, expected)
        for out, _ in (got, expected):
            out.square().sum().backward()
    for name in names:
        lora, merged = getattr(adapted, name), getattr(gqa, name)
        assert_close(lora.up.grad, merged.weight.grad @ lora.down.T)
        assert_close(lora.weight.grad, merged.weight.grad)
    if mode != "exact":
        assert "attention" in fused_calls(adapted, *call, **options)


@pytest.mark.parametrize("shape", ["batch first", "sequence first", "unbatched"])
@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_called_projections_keep_the_layout(shape, mode):
    gqa, (q, k, v) = layer(), inputs()
    if shape == "unbatched":
        q, k, v = q[0], k[0], v[0]
    elif shape == "sequence first":
        gqa.batch_first = False
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    called = copy.deepcopy(gqa)
    called.k_proj.register_forward_hook(lambda *args: None)
    with multihead.backend(mode):
        got, expected = called(q, k, v), gqa(q, k, v)
    assert got[0].shape == q.shape
    assert_close(got, expected)


def test_dropout_of_called_projections():
    gqa, call = layer(dropout=1.0), inputs()
    gqa.q_proj.register_forward_hook(lambda *args: None)
    out, weights = gqa(*call)
    assert weights.eq(0).all()
    assert_close(out, gqa.out_proj.bias.expand_as(out))
    assert gqa.eval()(*call)[1].gt(0).any()


HOOKS = {
    "forward": lambda child, seen: child.register_forward_hook(
        lambda *args: seen.append(1)
    ),
    "pre": lambda child, seen: child.register_forward_pre_hook(
        lambda *args: seen.append(1)
    ),
    "backward": lambda child, seen: child.register_full_backward_hook(
        lambda *args: seen.append(1)
    ),
    "backward pre": lambda child, seen: child.register_full_backward_pre_hook(
        lambda *args: seen.append(1)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_projections_run(name, kind):
    gqa, seen = layer(), []
    HOOKS[kind](getattr(gqa, name), seen)
    q, k, v = (x.requires_grad_() for x in inputs())
    gqa(q, k, v)[0].sum().backward()
    assert seen == [1]


def test_a_hook_changes_what_is_attended_to():
    gqa, call = layer(), inputs()
    gqa.v_proj.register_forward_hook(lambda module, args, result: result * 0)
    assert_close(gqa(*call)[0], gqa.out_proj.bias.expand(2, 3, E))


def test_hooks_of_all_modules_run():
    gqa, seen = layer(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, result: seen.append(module)
    )
    try:
        gqa(*inputs())
    finally:
        handle.remove()
    assert seen == [gqa.q_proj, gqa.k_proj, gqa.v_proj, gqa.out_proj, gqa]


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_of_its_own_is_called(name):
    """As accelerate replaces it, and other tools that patch instances."""
    gqa, call = layer(), inputs()
    child = getattr(gqa, name)
    child.forward = lambda x: torch.zeros(*x.shape[:-1], child.out_features)
    zeroed = copy.deepcopy(layer())
    nn.init.zeros_(getattr(zeroed, name).weight)
    nn.init.zeros_(getattr(zeroed, name).bias)
    assert_close(gqa(*call), zeroed(*call))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm]
)
def test_parametrized_projections_train(norm):
    gqa, call = layer(), inputs()
    expected = gqa(*call)
    for name in NAMES:
        norm(getattr(gqa, name))
    assert_close(gqa(*call), expected)
    optimizer = torch.optim.SGD(gqa.parameters(), lr=0.001)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(gqa(*call)[0].square().sum())
        losses[-1].backward()
        assert all(p.grad is not None for p in gqa.parameters())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_dynamically_quantized_projections():
    gqa, call = layer().eval(), inputs()
    quantized = torch.ao.quantization.quantize_dynamic(gqa, {nn.Linear})
    assert type(quantized.q_proj) is torch.ao.nn.quantized.dynamic.Linear
    with torch.no_grad():
        assert_close(quantized(*call)[0], gqa(*call)[0], rtol=0, atol=0.05)


def test_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = nn.ModuleDict({"attention": layer()})
    call = inputs()
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    gqa = adapted.base_model.model["attention"]
    out = gqa(*call)[0]
    assert not torch.allclose(out, model["attention"](*call)[0], atol=1e-3)
    out.sum().backward()
    trained = {n for n, p in gqa.named_parameters() if p.grad is not None}
    assert all("lora_" in name for name in trained) and len(trained) == 4
    merged = adapted.merge_and_unload()["attention"]
    assert type(merged.q_proj) is nn.Linear
    assert_close(merged(*call)[0], out)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensor_parallel(world_size):
    """A rank has some of the heads. (Nothing is sent in this group, so with two
    ranks the sum over them is missing.)"""
    pytest.importorskip("torch.distributed.tensor", reason="built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gqa, call = layer(), inputs()
    expected = gqa(*call, average_attn_weights=False)
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=world_size
    )
    try:
        plan = {name: parallel.ColwiseParallel() for name in NAMES[:3]}
        plan["out_proj"] = parallel.RowwiseParallel()
        mesh = init_device_mesh("cpu", (world_size,))
        parallel.parallelize_module(gqa, mesh, plan)
        out, weights = gqa(*call, average_attn_weights=False)
        out = out + 0  # waits for what was sent
    finally:
        torch.distributed.destroy_process_group()
    assert out.shape == (2, 3, E)
    assert weights.shape == (2, H // world_size, 3, 5)
    if world_size == 1:
        assert_close((out, weights), expected)


def test_called_projections_compile():
    gqa, call = layer(), inputs()
    for name in ("q_proj", "v_proj"):
        setattr(gqa, name, LoRA(getattr(gqa, name)))
    compiled = torch.compile(gqa, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*call), gqa(*call))


def test_plain_projections_are_fused_in_one_operator():
    gqa, call = layer(), inputs()
    seen = []

    class Modes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Modes():
        gqa(*call)
    assert seen == ["multihead::grouped_query_attention_forward"]


# --- The operator between the projections ----------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("masking", masks())
def test_the_operator_is_attention_with_identities(masking, mode):
    """Heads as they are, against a layer whose projections change nothing."""
    gqa = multihead.GroupedQueryAttention(E, H, H, batch_first=True, bias=False)
    for name in NAMES:
        nn.init.eye_(getattr(gqa, name).weight)
    call, options = inputs(), masks()[masking]
    with multihead.backend(mode):
        expected = gqa(*call, **options)
        got = torch.ops.multihead.projected_attention_forward(
            *call, E // H, **options, batch_first=True, backend=mode
        )
    assert_close(got, expected)


def test_some_heads_of_a_layer_drop_what_they_would_drop_together():
    operator = torch.ops.multihead.projected_attention_forward

    def attend(of_heads, function=operator):
        torch.manual_seed(0)
        given = [x[..., of_heads] for x in inputs()]
        place = dict(heads_in_all=H, first_head=of_heads.start * H // E)
        options = dict(average_attn_weights=False, batch_first=True)
        return function(*given, E // H, 0.5, **options, **place)

    whole, weights = attend(slice(0, E))
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    for function in (operator, compiled):
        some, some_weights = attend(slice(E // 2, E), function)
        assert torch.equal(some, whole[..., E // 2 :])
        assert torch.equal(some_weights, weights[:, H // 2 :])


def test_errors_of_the_operator():
    operator = torch.ops.multihead.projected_attention_forward
    q = torch.randn(3, 2, 8)
    for call, error, text in (
        (
            lambda: operator(q, q, q, 0),
            ValueError,
            "head_dim must be greater than 0, got 0",
        ),
        (lambda: operator(q, q, q, 3), RuntimeError, "dimension of 6, but got 8"),
        (lambda: operator(q, q, q, 16), ValueError, "num_heads must be greater than 0"),
        (
            lambda: operator(q, q[..., :6], q[..., :6], 4),
            RuntimeError,
            "key must have 1 heads of width 4, got 6 columns",
        ),
        (
            lambda: operator(q, q, q[..., :4], 4),
            RuntimeError,
            "value must have 2 heads of width 4, got 4 columns",
        ),
        (
            lambda: operator(q, q, q, 4, heads_in_all=4, first_head=3),
            ValueError,
            "first_head must be between 0 and .* less the heads of query, 2, got 3",
        ),
    ):
        with pytest.raises(error, match=text):
            call()


# --- out_proj of MultiheadAttention ------------------------------------------------------


def pair():
    torch.manual_seed(0)
    ours = multihead.MultiheadAttention(E, H, batch_first=True)
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("masking", masks())
def test_an_out_projection_that_was_replaced_is_called(masking):
    ours, _ = pair()
    call, options = inputs(), masks()[masking]
    merged = copy.deepcopy(ours)
    ours.out_proj = LoRA(ours.out_proj)
    merged.out_proj.weight = nn.Parameter(ours.out_proj.merged().detach())
    assert_close(ours(*call, **options), merged(*call, **options))
    ours(*call)[0].sum().backward()
    assert ours.out_proj.up.grad.ne(0).any()


def test_hooks_of_an_out_projection_run():
    ours, _ = pair()
    expected, seen = ours(*inputs()), []
    ours.out_proj.register_forward_hook(lambda *args: seen.append(1))
    assert_close(ours(*inputs()), expected)
    assert seen == [1]


def test_exact_reads_the_out_projection_as_pytorch_does():
    """torch.nn.MultiheadAttention never calls it, and so neither hook nor LoRA."""
    ours, theirs = pair()
    ours.out_proj = LoRA(ours.out_proj)
    ours.out_proj.register_forward_hook(lambda *args: pytest.fail("called"))
    with multihead.backend("exact"):
        assert_equal(ours(*inputs()), theirs(*inputs()))


def test_peft_of_multihead_attention():
    """peft has a wrapper for nn.MultiheadAttention, which merges for each call."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    outs = []
    for mha in pair():
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["mha"], init_lora_weights=False)
        model = peft.get_peft_model(nn.ModuleDict({"mha": mha}), config)
        outs.append(model.base_model.model["mha"](*inputs()))
    assert_close(*outs)


# --- Conversions --------------------------------------------------------------------------


def test_conversions_refuse_what_they_would_lose():
    gqa = layer()
    gqa.v_proj = LoRA(gqa.v_proj)
    with pytest.raises(
        TypeError, match="to_multihead: v_proj must be a torch.nn.Linear"
    ):
        gqa.to_multihead()
    ours, _ = pair()
    ours.out_proj = LoRA(ours.out_proj)
    with pytest.raises(TypeError, match="from_multihead: out_proj must be a torch.nn"):
        multihead.GroupedQueryAttention.from_multihead(ours, G)
