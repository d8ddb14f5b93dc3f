# SPDX-License-Identifier: MIT
"""torch.fx, torch.ao.quantization and torch.jit on models that hold ours."""

import copy
import pickle

import pytest
import torch
from equal import assert_equal
from paths import fused_calls
from torch import fx, nn
from torch.testing import assert_close

import multihead

E = 8


class Model(nn.Module):
    """A layer, and the function, among other things."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(E, E), layer

    def forward(self, x, mask=None):
        x = torch.relu(self.linear(x))
        y = multihead.scaled_dot_product_attention(x, x, x, is_causal=True)
        out, weights = self.attention(x, y, y, attn_mask=mask)[:2]
        return out + x, weights


LAYERS = {
    "multi-head": lambda: multihead.MultiheadAttention(
        E, 2, dropout=0.5, batch_first=True
    ),
    "grouped": lambda: multihead.GroupedQueryAttention(
        E, 2, 1, dropout=0.5, batch_first=True
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_symbolic_trace_takes_a_layer_for_a_leaf(name):
    torch.manual_seed(0)
    model, x = Model(LAYERS[name]()).eval(), torch.randn(2, 5, E)
    traced = fx.symbolic_trace(model)
    nodes = {node.op: node.target for node in traced.graph.nodes}
    assert nodes["call_module"] == "attention"
    assert multihead.scaled_dot_product_attention in [
        n.target for n in traced.graph.nodes
    ]
    assert not [n for n in traced.graph.nodes if n.op == "get_attr"]
    mask = torch.zeros(5, 5, dtype=torch.bool).logical_not().triu(1)
    for arguments in ((x,), (x, mask)):
        assert_equal(traced(*arguments), model(*arguments))
        assert_equal(copy.deepcopy(traced)(*arguments), model(*arguments))
    assert_equal(pickle.loads(pickle.dumps(traced))(x), model(x))
    assert fused_calls(traced, x)[:2] == ["attention"] * 2
    with multihead.backend("exact"):  # it was traced under "auto"
        assert_equal(traced(x), model(x))
    assert not torch.equal(traced.train()(x)[0], traced(x)[0])  # dropout


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_are_not_traced_to_run_twice(name):
    model, x = Model(LAYERS[name]()).eval(), torch.randn(2, 5, E)
    model.attention.register_forward_hook(lambda m, a, result: (2 * result[0], None))
    with pytest.raises(fx.proxy.TraceError, match="is_leaf_module is True for 'att"):
        fx.symbolic_trace(model)

    class Leaf(fx.Tracer):
        def is_leaf_module(self, module, name):
            return name == "attention" or super().is_leaf_module(module, name)

    traced = fx.GraphModule(model, Leaf().trace(model))
    assert_equal(traced(x), model(x))


def test_other_functions_are_recorded():
    q = torch.randn(1, 2, 3, E)

    def function(q):
        return multihead.attention_summary(q, q, 2)[0]

    assert_equal(fx.symbolic_trace(function)(q), function(q))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_jit_trace_names_the_way_out(name, check):
    model, x = Model(LAYERS[name]()).eval(), torch.randn(2, 5, E)
    with pytest.raises(RuntimeError, match="torch.jit.trace cannot .* torch.export"):
        torch.jit.trace(model, x, check_trace=check)
    exported = torch.export.export(model, (x,)).module()
    assert_close(exported(x), model(x))


COUNTERPART = "the model with torch.nn.MultiheadAttention, which has the same state_dic"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("tool", ["trace", "script"])
def test_jit_names_a_counterpart_where_there_is_one(tool):
    class Function(nn.Module):
        def forward(self, q):
            return multihead.scaled_dot_product_attention(q, q, q, window=(2, 0))

    x = torch.randn(2, 5, E)
    modules = {name: (make().eval(), (x, x, x)) for name, make in LAYERS.items()}
    if tool == "trace":
        modules["function"] = (Function(), (x,))
    for name, (module, inputs) in modules.items():
        for held in (module, nn.Sequential(module)) if tool == "script" else (module,):
            with pytest.raises(RuntimeError, match=f"^torch.jit.{tool} cannot") as info:
                if tool == "trace":
                    torch.jit.trace(held, inputs)
                else:
                    torch.jit.script(held)
            has_counterpart = f"{tool} {COUNTERPART}" in str(info.value)
            assert has_counterpart == (name == "multi-head")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_jit_traces_the_function_with_pytorchs_arguments():
    class Function(nn.Module):
        def forward(self, q):
            return multihead.scaled_dot_product_attention(q, q, q, is_causal=True)

    traced = torch.jit.trace(Function(), torch.randn(2, 5, E))
    x = torch.randn(2, 7, E)
    assert_equal(traced(x), Function()(x))


# --- torch.ao.quantization --------------------------------------------------------------

DEPRECATED = pytest.mark.filterwarnings("ignore")


class Quantized(nn.Module):
    def __init__(self, mha: nn.Module) -> None:
        super().__init__()
        self.mha = mha
        self.quant = torch.ao.quantization.QuantStub()
        self.dequant = torch.ao.quantization.DeQuantStub()

    def forward(self, x):
        x = self.quant(x)
        return self.dequant(self.mha(x, x, x)[0])


@DEPRECATED
@pytest.mark.parametrize("bias_kv", [False, True])
def test_prepare_and_convert_as_of_torch_nn(bias_kv):
    """Ours is replaced by PyTorch's quantizable module, with the same results."""
    outs, x = [], torch.rand(2, 5, E)
    ours = multihead.MultiheadAttention(E, 2, batch_first=True, add_bias_kv=bias_kv)
    theirs = nn.MultiheadAttention(E, 2, batch_first=True, add_bias_kv=bias_kv)
    theirs.load_state_dict(ours.state_dict())
    for mha in (ours, theirs):
        model = Quantized(mha).eval()
        model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
        prepared = torch.ao.quantization.prepare(model)
        assert isinstance(prepared.mha, torch.ao.nn.quantizable.MultiheadAttention)
        outs.append([prepared(x)])
        converted = torch.ao.quantization.convert(prepared)
        assert type(converted.mha) is torch.ao.nn.quantized.MultiheadAttention
        outs[-1].append(converted(x))
    assert_equal(*outs)


@DEPRECATED
def test_from_float():
    mha = multihead.MultiheadAttention(E, 2)
    mha.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    classes = torch.ao.quantization.get_default_custom_config_dict()
    observed = classes["float_to_observed_custom_module_class"][type(mha)].from_float(
        mha
    )
    x = torch.rand(5, 2, E)
    assert_close(observed(x, x, x), mha.eval()(x, x, x))


@DEPRECATED
def test_prepare_fx_leaves_a_layer_as_it_is():
    from torch.ao.quantization import QConfigMapping, get_default_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model, x = Model(LAYERS["multi-head"]()).eval(), torch.randn(2, 5, E)
    mapping = QConfigMapping().set_module_name("linear", get_default_qconfig("fbgemm"))
    converted = convert_fx(prepare_fx(copy.deepcopy(model), mapping, (x,)))
    assert type(converted.attention) is multihead.MultiheadAttention
    assert converted(x)[0].shape == x.shape
