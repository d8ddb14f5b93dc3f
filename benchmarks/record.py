#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tables of a record, from what `multihead bench --json` wrote:

    ./run python benchmarks/record.py bench.json avx2.json > record.md

The second file is optional: the same cases with both sides held to AVX2. Of a case that
was measured again, the later file of the kind counts: give the standard grid first.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator

BASELINES = ("SDPA", "nn.MHA", "torch::nn")
HEAD = (
    "| case | sizes | times | paired | peak | two threads: times | peak | over one "
    "| AVX2: times | paired | peak |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def entries(measurement: dict) -> tuple[dict, dict] | None:
    """Ours and the one that it is compared with first; None where there are none."""
    sound = {e["name"]: e for e in measurement["contenders"] if e["status"] == "ok"}
    ours = sound.pop("ours", None)
    named = [sound[name] for name in BASELINES if name in sound]
    theirs = next(iter([*named, *sound.values()]), None)
    return (ours, theirs) if ours and theirs else None


def cells(measurement: dict | None, paired: bool) -> list[str]:
    found = entries(measurement) if measurement else None
    if found is None:
        return [""] * (3 if paired else 2)
    ours, theirs = found
    noisy = " ~" if measurement["peak"]["noisy"] else ""
    times = [f"{theirs['ratio']['best']:.2f}"]
    if paired:
        times.append(f"{theirs['ratio']['paired']['median']:.2f}")
    return [*times, f"{100 * ours['share_of_peak']:.0f} %{noisy}"]


def rows(grid: list[dict], avx2: list[dict]) -> Iterator[tuple[str, str]]:
    """(group, line) of each case."""
    one, two, held = (
        {m["case"]: m for m in measured if m["threads"] == threads}
        for measured, threads in ((grid, 1), (grid, 2), (avx2, 1))
    )
    for case, measurement in one.items():
        scaling = two.get(case, {}).get("scaling")
        parts = [case, measurement["shapes"], *cells(measurement, True)]
        parts += [*cells(two.get(case), False), f"{scaling:.2f}" if scaling else ""]
        parts += cells(held.get(case), True)
        yield measurement["group"], f"| {' | '.join(parts)} |"


def missed(measured: list[dict]) -> tuple[list[str], int]:
    lines, count = [], 0
    for measurement in measured:
        for target in measurement["targets"]:
            count += 1
            if not target["met"]:
                reached, wanted = target["reached"], target["wanted"]
                lines.append(
                    f"| {measurement['case']} | {target['what']} | {reached:.2f} "
                    f"| {wanted:.2f} |"
                )
    return lines, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    records = [json.loads(file.read_text()) for file in parser.parse_args().files]
    grid = [
        m for r in records if not r["pytorch_held_to_isa"] for m in r["measurements"]
    ]
    avx2 = [m for r in records if r["pytorch_held_to_isa"] for m in r["measurements"]]
    group = ""
    for name, line in rows(grid, avx2):
        if name != group:
            group = name
            print(f"\n## {group[:1].upper()}{group[1:]}\n\n{HEAD}")
        print(line)
    for what, measured in (("What is missed", grid), ("Held to AVX2", avx2)):
        lines, count = missed(measured)
        if measured:
            print(f"\n## {what}\n\n{count - len(lines)} of {count} targets are met.\n")
            print("| case | target | reached | wanted |\n|---|---|---:|---:|")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
