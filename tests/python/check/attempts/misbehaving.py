# SPDX-License-Identifier: MIT
"""Attention that does something else as well, or never ends."""

import random
import sys
import time

import torch
import torch.nn.functional as F


def _attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores, dim=-1) @ v


def raises(q, k, v):
    return q @ k


def asserts(q, k, v):
    assert q.shape[-1] == 512, "the model has 512 channels"
    return _attention(q, k, v)


def misspelt(q, k, v):
    return torch.softmaks(q @ k.transpose(-2, -1), dim=-1) @ v


def loops_forever(q, k, v):
    i = 0
    while i < len(k):
        out = _attention(q, k, v)
    return out


def sleeps(q, k, v):
    time.sleep(3600)
    return _attention(q, k, v)


def calls_itself(q, k, v):
    return calls_itself(q, k, v)


def forgets_to_return(q, k, v):
    _attention(q, k, v)


def returns_flat(q, k, v):
    return _attention(q, k, v).flatten(-2)


def returns_the_weights(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)


def returns_nan(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return (scores / (scores - scores).sum()).softmax(dim=-1) @ v


def returns_integers(q, k, v):
    return _attention(q, k, v).long()


def returns_lists(q, k, v):
    return _attention(q, k, v).tolist()


def returns_a_number(q, k, v):
    return _attention(q, k, v).sum().item()


def returns_a_dictionary(q, k, v):
    return {"output": _attention(q, k, v).tolist()}


def returns_half(q, k, v):
    return _attention(q, k, v).half()


def needs_a_package(q, k, v):
    import a_package_that_nobody_has as einops

    return einops.rearrange(_attention(q, k, v), "... l d -> ... l d")


def seeds(q, k, v):
    torch.manual_seed(0)
    random.seed(0)
    return _attention(q, k, v)


def switches_gradients_off(q, k, v):
    torch.set_grad_enabled(False)
    return _attention(q, k, v)


def changes_the_default_dtype(q, k, v):
    torch.set_default_dtype(torch.float64)
    return _attention(q, k, v)


def changes_the_threads(q, k, v):
    torch.set_num_threads(2)
    return _attention(q, k, v)


def scales_its_input(q, k, v):
    q /= q.shape[-1] ** 0.5
    return F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def fills_its_input(q, k, v):
    out = _attention(q, k, v)
    v.zero_()
    return out


def prints(q, k, v):
    print("scores", (q @ k.transpose(-2, -1)).shape)
    print("hello from stderr", file=sys.stderr)
    return _attention(q, k, v)


def leaves(q, k, v):
    print("done")
    sys.exit(0)


def leaves_quietly(q, k, v):
    raise SystemExit


def asks(q, k, v):
    if input("scale? ") == "no":
        return F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v
    return _attention(q, k, v)


def differs_from_call_to_call(q, k, v):
    return _attention(q, k, v) + 0.1 * torch.randn_like(q)
