# SPDX-License-Identifier: MIT
"""Says whether somebody's attention is right, and if not, names the fault.

This package calls and watches the code under test; what is right and what a fault
is called, the C++ library says (multihead/diagnosis.h).
"""

from collections.abc import Sequence

from .assertion import assert_attention
from .options import Options
from .report import Finding, Report
from .session import examine

__all__ = ["Finding", "Options", "Report", "assert_attention", "check", "examine"]


def check(
    target: object,
    *,
    num_heads: int | None = None,
    embed_dim: int | None = None,
    num_kv_heads: int | None = None,
    mask: str | None = None,
    batch_first: bool | None = None,
    causal: bool | None = None,
    weights: object = None,
    inputs: object = None,
    call: str | None = None,
    time_limit: float = 20.0,
    allow: str | Sequence[str] = (),
) -> Report:
    """Checks an implementation of attention and says what is wrong with it.

    The target is a function, a module, a class of modules, or "file.py:name". What its
    arguments mean is read from their names; weights are its parameters, its
    arguments, or the layers that it creates while it runs. It is called with inputs
    (B, Lq, E), (B, Lk, E) or what else it takes, all sizes different, in float64 and
    float32, with each kind of mask that it accepts, with gradients, in evaluation
    and in training; a module is copied and stays as it is.

    Everything that is not stated is found out, and the report says what was assumed.

    Args:
        target: the code under test.
        num_heads: a size to call it with, like the next two.
        embed_dim: the width E.
        num_kv_heads: heads of key and value.
        mask: what a mask means: "blocked" (True or nonzero = may not attend), "keep"
            (True = may attend) or "additive" (added to the scores).
        batch_first: inputs are (B, L, E), else (L, B, E).
        causal: the code is causal by itself.
        weights: a module, or tensors by name, that the code uses where it cannot be
            seen.
        inputs: arguments of one more call, a tuple or a dictionary by name. Where no
            other call is found, all are like it.
        call: how it is constructed and called, as text: "Attention(dim=E)(x, mask)".
            x, or q, k and v, context, mask, padding, B, L, S (the number of keys), E, H
            and D stand for what each run brings.
        time_limit: seconds for the code under test, all calls together.
        allow: names of conditions that hold, such as "mask_keeps", or "all": code
            that is right only if they do passes then. Report.conditions has those
            that decide where nothing states what is meant.

    Checks change what is one for the whole process, and put it back; those in other
    threads wait for their turn.

    Returns:
        A Report, which is true if the code passed: it is right, and on no condition
        that is not allowed. Code that raises, hangs or returns something else is a
        finding in it. Code that nobody knows how to call is not judged.

    Raises:
        ValueError: arguments that cannot be.
        FileNotFoundError: a file that is not there.
    """
    stated = dict(locals())  # the options, by the same names
    del stated["target"]
    return examine(target, Options(**stated))
