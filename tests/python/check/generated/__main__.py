# SPDX-License-Identifier: MIT
"""./run python tests/python/check/generated [OPTIONS]: see counts.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "attention"))

from generated.counts import main

if __name__ == "__main__":
    sys.exit(main())
