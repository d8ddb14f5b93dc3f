# SPDX-License-Identifier: MIT
"""What tests of `multihead show` look at pictures with: PNG, columns, a browser."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import struct
import subprocess
import unicodedata
import zlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(os.environ.get("MULTIHEAD_BUILD_DIR", ROOT / "build" / "release"))
COMMAND = BUILD / "cli" / "multihead"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def show(
    *arguments: object, cwd: pathlib.Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `multihead show` in a UTF-8 locale; output is a pipe."""
    return subprocess.run(
        [str(COMMAND), "show", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "LC_ALL": "C.UTF-8", **environment},
        cwd=cwd,
        timeout=120,
    )


def shown(
    *arguments: object, cwd: pathlib.Path | None = None, **environment: str
) -> str:
    """Standard output of a run that must succeed."""
    result = show(*arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def without_codes(text: str) -> str:
    """Text less its colours and cursor movements."""
    return re.sub(r"\x1b\[[\d;]*[mG]", "", text)


def columns(line: str) -> int:
    """Columns of a terminal, by Unicode's tables instead of the C library's."""
    line = re.sub(r"\u200d.", "", line)  # joined emoji are drawn as one
    line = re.sub(r"[\U0001f1e6-\U0001f1ff]{2}", "日", line)  # flags
    widths = {"W": 2, "F": 2}
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me", "Cf")
        else widths.get(unicodedata.east_asian_width(c), 1)
        for c in line
    )


def can_draw_png() -> bool:
    """Whether librsvg is there, which draws PNG from SVG."""
    try:
        ctypes.CDLL("librsvg-2.so.2")
    except OSError:
        return False
    return True


def decode_png(content: bytes) -> np.ndarray:
    """(height, width, 3) of a PNG of 8-bit colours, with or without alpha."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, data, header = 8, b"", b""
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kind, body = (
            content[place + 4 : place + 8],
            content[place + 8 : place + 8 + length],
        )
        (check,) = struct.unpack(">I", content[place + 8 + length :][:4])
        assert zlib.crc32(kind + body) == check
        header += body if kind == b"IHDR" else b""
        data += body if kind == b"IDAT" else b""
        place += 12 + length
    width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", header)
    assert depth == 8 and colour in (2, 6) and not interlaced
    channels = 3 if colour == 2 else 4
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    image = np.zeros((height + 1, width * channels), np.uint8)
    for y, (kind, *row) in enumerate(rows.tolist()):
        image[y + 1] = unfiltered(kind, row, image[y].tolist(), channels)
    return image[1:].reshape(height, width, channels)[..., :3]


def unfiltered(kind: int, row: list[int], above: list[int], channels: int) -> list[int]:
    """The bytes of a row without its filter. Numbers of Python: NumPy takes longer for
    so few at a time."""
    if kind == 0:
        return row
    if kind == 2:
        return [(x + b) & 255 for x, b in zip(row, above)]
    here = [0] * channels  # before the row, and before the one above it
    if kind == 1:
        for x in row:
            here.append((x + here[-channels]) & 255)
    elif kind == 3:
        for x, b in zip(row, above):
            here.append((x + (here[-channels] + b) // 2) & 255)
    else:
        for x, b, c in zip(row, above, here + above):
            a = here[-channels]
            far_a, far_b, far_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            near_a = far_a <= far_b and far_a <= far_c
            here.append((x + (a if near_a else b if far_b <= far_c else c)) & 255)
    return here[channels:]


def browse(page: pathlib.Path, *options: str, fragment: str = "") -> str:
    """Has the browser open a page, offline; its standard output."""
    result = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={page.parent / 'profile'}",
            "--window-size=1200,1000",
            "--virtual-time-budget=2000",
            *options,
            page.as_uri() + fragment,
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def screenshot(page: pathlib.Path, *options: str, fragment: str = "") -> np.ndarray:
    """(height, width, 3), what the browser shows of a page."""
    picture = page.with_suffix(".shot.png")
    browse(page, f"--screenshot={picture}", *options, fragment=fragment)
    return decode_png(picture.read_bytes())


def after(page: pathlib.Path, script: str, *options: str) -> dict[str, str]:
    """What a script, run at the end of a copy of the page, hands to report(name,
    value)."""
    copy = page.with_suffix(".copy.html")
    report = (
        "const report = (name, value) => document.body.setAttribute("
        "`data-${name}`, value);"
    )
    end = f"<script>{{ {report} {script} }}</script></body>"
    copy.write_text(page.read_text().replace("</body>", end))
    dom = browse(copy, "--dump-dom", *options)
    body = re.search(r"<body[^>]*>", dom)
    assert body, dom[:500]
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', body[0]))
