# SPDX-License-Identifier: MIT
"""torch.distributed.checkpoint: what one layout has written, others read."""

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from models import Run, world_of
from ranks import run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _state(training):
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return dict(model=model, optimizer=optimizer)


def save(layout, folder):
    """One step, written; then what one step more comes to."""
    training = Run(layout)
    training.step(1)
    checkpoint.save(_state(training), checkpoint_id=folder)
    written = training.values(), training.moments()
    return *written, training.step(2), training.values()


def load(layout, folder):
    """What is read into a model of other weights, and one step more."""
    training = Run(layout, seed=1)
    state = _state(training)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    read = training.values(), training.moments()
    return *read, training.step(2), training.values()


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("fsdp 2", ["whole", "fsdp 4", "tp 4", "fsdp 2 x tp 2"]),
        ("tp 2", ["whole", "fsdp 2", "fsdp 4", "fsdp 2 x tp 2"]),
        ("fsdp 1 x tp 2", ["whole", "tp 4"]),
        ("fsdp 2 x tp 2", ["whole", "fsdp 2", "fsdp 1 x tp 2"]),
        ("tp 4", ["tp 2"]),
        ("whole", ["tp 2", "fsdp 2 x tp 2"]),
        ("cp 2", ["whole", "tp 2 x cp 2"]),
    ],
)
def test_layouts_read_what_another_wrote(writer, readers, tmp_path):
    """Weights and AdamW's moments to the bit, and they go on from there alike."""
    folder = str(tmp_path / "checkpoint")
    *written, loss, after = run(save, world_of(writer), layout=writer, folder=folder)[0]
    for reader in readers:
        for got in run(load, world_of(reader), layout=reader, folder=folder):
            torch.testing.assert_close(got[:2], tuple(written), rtol=0, atol=0)
            close = dict(rtol=0, atol=2.0**-42)
            torch.testing.assert_close(got[2], loss, **close)
            torch.testing.assert_close(got[3], after, **close)
