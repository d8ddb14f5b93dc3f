# SPDX-License-Identifier: MIT
"""What a command prints where its output is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess


def printed_in_terminal(command: list[str], width: int, **environment: str) -> str:
    """Standard output of a command that succeeds, in a terminal of `width` columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["sh", "-c", f'stty cols {width} && exec "$0" "$@"', *command],
        stdin=follower,
        stdout=follower,
        env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment},
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not block:
            break
        output += block
    os.close(leader)
    assert process.wait(timeout=120) == 0
    return output.decode().replace("\r\n", "\n")
