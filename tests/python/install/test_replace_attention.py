# SPDX-License-Identifier: MIT
"""multihead.replace_attention() on models that exist, and restore_attention()."""

import copy
import io
import pickle

import pytest
import test_pytorch_modules as pytorchs
import torch
from budget import assert_as_good, ways
from equal import assert_equal
from test_pytorch_modules import EACH_MODEL, MODELS, B, E, H, L, inputs
from torch import nn
from torch.nn.utils import parametrize

import multihead
from multihead import replace_attention, restore_attention

pytestmark = pytorchs.pytestmark


def attributes(model):
    """What a model consists of, its tensors by identity."""
    return [
        (
            name,
            type(module),
            {key: _shown(value) for key, value in vars(module).items()},
        )
        for name, module in model.named_modules()
    ]


def _shown(value):
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    return id(value) if isinstance(value, (torch.Tensor, nn.Module)) else value


def reached() -> dict[str, int]:
    """Calls of modules since reset_stats(), and that there were no others."""
    counted = ways("module")
    assert counted == ways(None)
    return counted


# --- Results -------------------------------------------------------------------------


@EACH_MODEL
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("run", [pytorchs.trained, pytorchs.inferred])
def test_models(name, batch_first, norm_first, padded, causal, run):
    """All attention runs on the kernels, the encoder's in inference too."""
    options = dict(batch_first=batch_first, norm_first=norm_first)
    model = MODELS[name](**options).train(run is pytorchs.trained)
    arguments = inputs(name, batch_first, padded, causal)
    before, theirs = attributes(model), run(model, *arguments)
    result = replace_attention(model)
    calls = {"transformer": 6, "encoder": 2, "decoder": 4, "attention": 2}[name]
    assert len(result.replaced) == len(result) == calls
    ours = run(model, *arguments)
    is_nested = (
        run is pytorchs.inferred and padded and batch_first and not norm_first
    ) and (name == "transformer" or name == "encoder" and not causal)
    # A nested tensor's sequences are calls of their own.
    assert reached() == {"fused": calls + 2 * (B - 1) * is_nested}
    assert restore_attention(model).replaced == result.replaced
    assert attributes(model) == before
    assert_equal(run(model, *arguments), theirs)
    source, target, masks = arguments
    exact = run(copy.deepcopy(model).double(), source.double(), target.double(), masks)
    assert_as_good(ours, theirs, exact, roundings=32)


@pytest.mark.parametrize("run", [pytorchs.trained, pytorchs.inferred])
def test_returned_weights(run):
    model = MODELS["attention"](need_weights=True, batch_first=True)
    model.train(run is pytorchs.trained)
    arguments = inputs("attention", True, True, True)
    theirs = run(model, *arguments)
    replace_attention(model)
    ours = run(model, *arguments)
    assert reached() == {"fused": 2}
    source, target, masks = arguments
    exact = run(copy.deepcopy(model).double(), source.double(), target.double(), masks)
    assert_as_good(ours, theirs, exact, roundings=32)


def test_padding_under_autocast():
    """PyTorch's encoder layer fails; autocast makes query, key and value three."""
    model = MODELS["encoder"](batch_first=True).eval()
    source, target, masks = inputs("encoder", True, True, False)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return pytorchs.inferred(model, source, target, masks)

    with pytest.raises(RuntimeError, match="expected scalar type"):
        run()
    expected = pytorchs.inferred(model, source, target, masks)
    replace_attention(model)
    torch.testing.assert_close(run().float(), expected, rtol=0.05, atol=0.05)
    assert reached() == {"nested tensors of cross-attention": 2}


# --- Nested tensors ------------------------------------------------------------------


def nested():
    return torch.nested.nested_tensor([torch.randn(n, E) for n in (3, L, 1)])


@torch.no_grad()
@pytest.mark.parametrize("in_layer", [False, True])
def test_nested_tensors(in_layer):
    model = (
        nn.TransformerEncoderLayer(E, H, batch_first=True)
        if in_layer
        else nn.MultiheadAttention(E, H, batch_first=True)
    ).eval()
    x = nested()

    def run(x):
        return model(x) if in_layer else model(x, x, x, need_weights=False)[0]

    theirs = run(x)
    replace_attention(model)
    ours = run(x)
    assert ours.is_nested and reached() == {"fused": 3}
    for mine, yours, part in zip(ours.unbind(), theirs.unbind(), x.unbind()):
        torch.testing.assert_close(mine, yours)
        torch.testing.assert_close(mine, run(part[None])[0])


def test_nested_tensors_that_pytorch_refuses():
    model, x = nn.MultiheadAttention(E, H, batch_first=True), nested()

    def message():
        with pytest.raises(AssertionError) as caught:
            model(x, x, x)
        return str(caught.value)

    theirs = message()  # in training
    replace_attention(model)
    assert message() == theirs and reached() == {}


@torch.no_grad()
def test_weights_of_nested_tensors_are_pytorchs():
    model, x = nn.MultiheadAttention(E, H, batch_first=True).eval(), nested()
    _, theirs = model(x, x, x)
    replace_attention(model)
    _, ours = model(x, x, x)
    assert_equal(ours, theirs)
    assert reached() == {"nested tensors with a mask or weights": 1}


# --- What is replaced ----------------------------------------------------------------


class Wider(nn.MultiheadAttention):
    """Adds to PyTorch's class, and changes nothing of what it has."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.note = "mine"

    def describe(self):
        return f"{self.note} {self.embed_dim}"


class Louder(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class Masked(nn.MultiheadAttention):
    def merge_masks(self, *args):
        return super().merge_masks(*args)


def patched():
    module = nn.MultiheadAttention(E, H)
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return module


def parametrized():
    module = nn.MultiheadAttention(E, H)
    return parametrize.register_parametrization(module, "in_proj_weight", nn.Identity())


def scripted():
    return torch.jit.script(nn.MultiheadAttention(E, H))


KEPT = {
    "forward of its class": (lambda: Louder(E, H), "Louder has its own forward"),
    "merge_masks": (lambda: Masked(E, H), "Masked has its own merge_masks"),
    "forward of its own": (patched, "has a forward of its own"),
    "quantizable": (
        lambda: torch.ao.nn.quantizable.MultiheadAttention(E, H),
        "torch.ao.nn.quantizable.modules.activation.MultiheadAttention has its own",
    ),
    "parametrized": (parametrized, "is parametrized"),
    "scripted": (scripted, "is TorchScript"),
    "ours": (lambda: multihead.MultiheadAttention(E, H), "is this package's already"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name):
    make, reason = KEPT[name]
    model = nn.ModuleDict({"one": make(), "other": nn.MultiheadAttention(E, H)})
    kind, before = type(model["one"]), attributes(model)
    result = replace_attention(model)
    assert type(model["one"]) is kind
    assert result.kept == ("one",) and result.replaced == ("other",)
    assert reason in result[0].reason
    restore_attention(model)
    assert attributes(model) == before


@torch.no_grad()
def test_a_subclass_keeps_what_it_adds():
    model, x = Wider(E, H, batch_first=True).eval(), torch.randn(B, L, E)
    theirs = model(x, x, x)
    assert replace_attention(model).replaced == ("",)
    assert isinstance(model, Wider) and isinstance(model, multihead.MultiheadAttention)
    assert type(model).__name__ == "Wider" and model.describe() == f"mine {E}"
    torch.testing.assert_close(model(x, x, x), theirs)
    assert reached() == {"fused": 1}
    other = copy.deepcopy(model)
    restore_attention(other)
    restore_attention(model)
    assert type(model) is type(other) is Wider
    assert_equal(other(x, x, x), theirs)


@torch.no_grad()
def test_the_root_itself():
    model, x = nn.MultiheadAttention(E, H), torch.randn(L, B, E)
    theirs = model(x, x, x)
    assert replace_attention(model) == (("", "MultiheadAttention", True, ""),)
    assert type(model) is multihead.MultiheadAttention
    torch.testing.assert_close(model(x, x, x), theirs)
    restore_attention(model)
    assert type(model) is nn.MultiheadAttention


def test_everything_else_stays():
    """Parameters, hooks, flags; the optimizer that has the parameters."""
    model = MODELS["encoder"](batch_first=True).to(torch.bfloat16)
    first = model.model.layers[0].self_attn
    heard = []
    first.register_forward_hook(lambda module, args, out: heard.append(module))
    first.in_proj_bias.requires_grad_(False)
    model.model.layers[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {name: id(x) for name, x in model.state_dict(keep_vars=True).items()}
    flags = [module.training for module in model.modules()]
    replace_attention(model)
    after = model.state_dict(keep_vars=True)
    assert state == {name: id(x) for name, x in after.items()}
    assert flags == [module.training for module in model.modules()]
    assert not first.in_proj_bias.requires_grad
    before = first.in_proj_weight.detach().clone()
    x = torch.randn(B, L, E, dtype=torch.bfloat16)
    (model(x, x) * x).sum().backward()  # the sum of normed features is constant
    optimizer.step()
    assert heard == [first] and not torch.equal(first.in_proj_weight, before)


def test_a_module_with_two_names_is_replaced_once():
    shared = nn.MultiheadAttention(E, H)
    model = nn.ModuleList([shared, shared])
    assert replace_attention(model).replaced == ("0",)
    assert type(model[1]) is multihead.MultiheadAttention
    restore_attention(model)
    assert type(shared) is nn.MultiheadAttention


def test_twice_is_once():
    model = MODELS["transformer"](batch_first=True)
    before = attributes(model)
    replace_attention(model)
    again = replace_attention(model)
    assert again.replaced == () and len(again.kept) == 6
    restore_attention(model)
    assert attributes(model) == before
    assert restore_attention(model) == ()
    assert attributes(model) == before


def test_a_part_may_be_restored():
    model = MODELS["encoder"](batch_first=True)
    layers = model.model.layers
    replace_attention(model)
    restore_attention(layers[0].self_attn)
    replace_attention(layers[1])
    assert [layer.activation_relu_or_gelu for layer in layers] == [0, 0]
    restore_attention(model)
    assert [layer.activation_relu_or_gelu for layer in layers] == [2, 2]
    assert not any("_multihead" in name for layer in layers for name in vars(layer))


def test_parametrized_after_it_was_replaced():
    model = nn.MultiheadAttention(E, H)
    replace_attention(model)
    parametrize.register_parametrization(model, "in_proj_weight", nn.Identity())
    assert "is parametrized" in restore_attention(model)[0].reason
    parametrize.remove_parametrizations(model, "in_proj_weight")
    assert restore_attention(model).replaced == ("",)
    assert type(model) is nn.MultiheadAttention


@torch.no_grad()
def test_copies_and_pickles():
    model = MODELS["encoder"](batch_first=True).eval()
    source, target, masks = inputs("encoder", True, True, False)
    theirs = model(source, target, **masks)
    replace_attention(model)
    ours = model(source, target, **masks)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert_equal(other(source, target, **masks), ours)
        restore_attention(other)
        assert_equal(other(source, target, **masks), theirs)


class Numbered(Wider):
    """Says itself how it is made anew."""

    def __reduce__(self):
        return type(self), (self.embed_dim, self.num_heads), self.__getstate__()


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Wider, Numbered])
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        saved_and_loaded,
        *(
            lambda model, p=p: pickle.loads(pickle.dumps(model, protocol=p))
            for p in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_copies_and_pickles_of_a_subclass(copied, kind):
    model, x = kind(E, H).eval(), torch.randn(L, B, E)
    theirs = model(x, x, x)
    replace_attention(model)
    model.note = "changed"
    ours = model(x, x, x)
    other = copied(model)
    assert type(other) is type(model) is not kind
    assert other.describe() == f"changed {E}"
    assert_equal(other(x, x, x), ours)
    assert reached() == {"fused": 2}
    restore_attention(other)
    assert type(other) is kind
    assert_equal(other(x, x, x), theirs)


def test_what_was_compiled_is_compiled_again():
    model = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(B, L, E)
    theirs = compiled(x)
    assert reached() == {}
    replace_attention(compiled)
    assert replace_attention(compiled).replaced == ()
    torch.testing.assert_close(compiled(x), theirs)
    assert ways(None) == {"fused": 1}
    restore_attention(compiled)
    assert model.activation_relu_or_gelu == 1
    assert_equal(compiled(x), theirs)
    assert ways(None) == {"fused": 1}


def test_a_layer_that_holds_ours_already():
    """PyTorch's inference path passes it by until it is switched off."""
    layer, x = nn.TransformerEncoderLayer(E, H, batch_first=True), torch.randn(B, L, E)
    layer.self_attn = multihead.MultiheadAttention(E, H, batch_first=True)
    layer.eval()
    before, theirs = (
        attributes(layer),
        pytorchs.inferred(lambda s, t: layer(t), x, x, {}),
    )
    assert replace_attention(layer).kept == ("self_attn",) and reached() == {}
    ours = pytorchs.inferred(lambda s, t: layer(t), x, x, {})
    assert reached() == {"fused": 1}
    torch.testing.assert_close(ours, theirs)
    assert restore_attention(layer) == ()
    assert attributes(layer) == before


def test_with_install():
    model = MODELS["encoder"](batch_first=True).eval()
    arguments = inputs("encoder", True, False, False)
    replace_attention(model)
    ours = pytorchs.inferred(model, *arguments)
    with multihead.installed():
        assert_equal(pytorchs.inferred(model, *arguments), ours)
    assert reached() == {"fused": 4}


def test_printing():
    model = nn.ModuleDict({"one": nn.MultiheadAttention(E, H), "second": Louder(E, H)})
    result = replace_attention(model)
    assert str(result) == repr(result)
    reason = f"{Louder.__module__}.Louder has its own forward"
    assert str(result).split("\n") == [
        "replaced  one     MultiheadAttention",
        f"kept      second  Louder              {reason}",
    ]
    root = replace_attention(nn.MultiheadAttention(E, H))
    assert str(root) == "replaced  the model itself  MultiheadAttention"
    assert str(replace_attention(nn.Linear(2, 2))) == "no torch.nn.MultiheadAttention"


@pytest.mark.parametrize("function", [replace_attention, restore_attention])
def test_no_module(function):
    text = f"{function.__name__}: model must be a torch.nn.Module, got 3"
    with pytest.raises(TypeError, match=text):
        function(3)
