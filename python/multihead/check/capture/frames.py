# SPDX-License-Identifier: MIT
"""What the functions of the code call their variables, and which of them ran."""

import importlib.util
import os
import re
import sys
import types
from collections import Counter, deque

import torch
from torch import nn

from ..sandbox.guard import stood_in


class Frames:
    """The variables of the code's own functions as they return, inner ones first;
    not those of libraries and of this package. `with Frames() as frames:` around a run.
    """

    def __init__(self) -> None:
        # The last ones: functions that call others return after them.
        self.found: deque[dict[str, object]] = deque(maxlen=200)
        self.called: set[str] = set()  # methods with their classes, and functions
        # Layers made during the run, whose names may be gone by its end.
        self.linears: list[nn.Linear] = []
        # Layers of dropout that were called, and how often each layer was, by identity.
        self.dropouts: set[int] = set()
        self.calls: Counter[int] = Counter()

    def __enter__(self) -> "Frames":
        self._previous = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_) -> None:
        sys.setprofile(self._previous)

    @property
    def turn(self) -> bool:
        """Whether functions ran that turn by positions, as their names say."""
        return not stood_in and any(map(ROTARY.search, self.called))

    def _note(self, frame: types.FrameType, event: str, _) -> None:
        if event != "return":
            return
        code = frame.f_code
        if code is nn.Linear.__init__.__code__:
            self.linears.append(frame.f_locals["self"])
        elif code is nn.Dropout.forward.__code__:
            self.dropouts.add(id(frame.f_locals["self"]))
        elif code is nn.Module._call_impl.__code__:
            self.calls[id(frame.f_locals["self"])] += 1
        generated = code.co_filename == "<string>" and code.co_name.startswith("__")
        if not generated and not code.co_filename.startswith(_FOREIGN):
            self.found.append(dict(frame.f_locals))
            owner = type(frame.f_locals.get("self")).__name__
            self.called.add(f"{owner}.{code.co_name}")


ROTARY = re.compile(r"(?<![A-Za-z])rope|Rope|R[oO]PE|[Rr]otary|[Rr]otat")  # no property
_NUMPY = importlib.util.find_spec("numpy")
_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname((_NUMPY and _NUMPY.origin) or torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen",
)
