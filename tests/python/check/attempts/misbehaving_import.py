# SPDX-License-Identifier: MIT
"""Needs a package that is not there, before anything is defined."""

import a_package_that_nobody_has
import torch


def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return a_package_that_nobody_has.mix(torch.softmax(scores, dim=-1), v)
