# SPDX-License-Identifier: MIT
"""What a module says of itself when it is printed."""

import pytest
from torch import nn

import multihead


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (dict(), "embed_dim=8, num_heads=2"),
        (
            dict(dropout=0.1, bias=False, batch_first=True),
            "embed_dim=8, num_heads=2, dropout=0.1, bias=False, batch_first=True",
        ),
        (
            dict(add_bias_kv=True, add_zero_attn=True, kdim=3, vdim=4),
            "embed_dim=8, num_heads=2, add_bias_kv=True, add_zero_attn=True, "
            "kdim=3, vdim=4",
        ),
    ],
)
def test_repr_shows_the_options_as_the_constructor_takes_them(options, shown):
    module = multihead.MultiheadAttention(8, 2, **options)
    assert repr(module).startswith(f"MultiheadAttention(\n  {shown}\n  (out_proj)")
    again = eval(f"multihead.MultiheadAttention({shown})")
    assert again.state_dict().keys() == module.state_dict().keys()


def test_repr_of_grouped_query_attention():
    options = "embed_dim=8, num_heads=4, num_kv_heads=2"
    module = multihead.GroupedQueryAttention(8, 4, 2)
    assert module.extra_repr() == options
    options += ", dropout=0.5, bias=False, kdim=3, head_dim=6, batch_first=True"
    module = eval(f"multihead.GroupedQueryAttention({options})")
    assert module.extra_repr() == options
    assert isinstance(module.q_proj, nn.Linear)
