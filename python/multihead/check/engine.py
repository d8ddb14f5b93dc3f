# SPDX-License-Identifier: MIT
"""The one place where observations become a verdict."""

import json

import torch

from .observation import Observation


def explain(observations: list[Observation]) -> dict:
    """The verdict on observations of one implementation, as the operator's JSON."""
    tensors = [o.tensors for o in observations]
    metadata = [o.metadata for o in observations]
    return json.loads(torch.ops.multihead.explain(tensors, metadata))
