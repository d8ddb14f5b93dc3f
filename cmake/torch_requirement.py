# SPDX-License-Identifier: MIT
"""Which PyTorch the package needs: a provider of metadata for scikit-build-core.

A source distribution builds against any supported PyTorch and asks for the range in
pyproject.toml. A wheel serves the one that its library was built against, and asks
for exactly that. It is the one that FindLibTorch.cmake finds.
"""

import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any


def torch_version() -> str:
    """The version of the PyTorch that CMake will find, "2.13.0".

    In the folder that the variable TORCH_ROOT names, else of this Python. Raises
    RuntimeError where there is none: then there is nothing to build against.
    """
    folder = os.environ.get("TORCH_ROOT")
    if not folder:
        spec = importlib.util.find_spec("torch")
        folders = spec.submodule_search_locations if spec else None
        folder = folders[0] if folders else None
    header = pathlib.Path(folder or "", "include/torch/headeronly/version.h")
    if not folder or not header.exists():
        raise RuntimeError(
            "multihead is built against an installed PyTorch, and there is none in "
            "this environment: install torch and use pip's --no-build-isolation, or "
            "set TORCH_ROOT to the folder of a torch package"
        )
    pattern = r"define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)"
    return ".".join(re.findall(pattern, header.read_text()))


class Provider:
    """What scikit-build-core calls; `range` comes from pyproject.toml."""

    def __init__(self) -> None:
        self.state = "wheel"

    def build_state(self, build_state: str) -> None:
        self.state = build_state

    def dynamic_metadata(
        self, settings: Mapping[str, Any], _project: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        if self.state == "sdist":
            return {"dependencies": [settings["range"]]}
        return {"dependencies": [f"torch=={torch_version()}"]}

    def dynamic_wheel(self, _settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}
