# SPDX-License-Identifier: MIT
"""Counts what `check` says of generated programs, and lists what it should not have
said, by seed."""

import argparse
import collections
import multiprocessing
import sys
import time
from itertools import islice

import torch

from .judge import (
    Judged,
    NoProgram,
    judged,
    right_program,
    wrong_program,
)

_TOLD = 100  # programs after which the counts are told again
BAD = ("accused", "wrongly named", "called right", "unnamed", "not judged")


def work(task: tuple[int, int]) -> Judged | str:
    torch.set_num_threads(1)
    try:
        return judged(*task)
    except NoProgram as reason:
        return str(reason)
    except Exception as error:  # an error of multihead's own is a result, too
        return Judged(task[0], "crashed", "", f"{type(error).__name__}: {error}", "")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generated", description=__doc__)
    parser.add_argument("--right", type=int, default=200, help="right programs")
    parser.add_argument("--wrong", type=int, default=500, help="wrong programs")
    parser.add_argument("--together", type=int, default=1, help="faults of a wrong one")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", default="", help="only programs with this fault")
    parser.add_argument("--list", default=",".join(BAD[:3]), help="kinds to list")
    parser.add_argument("--show", type=int, help="print the program of a seed")
    parser.add_argument("--of", choices=("right", "wrong"), default="wrong")
    return parser


def results(seeds: range, count: int, faults: int, processes: int, fault: str):
    """Judged programs of so many faults until there are `count`, and seeds that gave
    none by reason."""
    lost = collections.Counter()
    context = multiprocessing.get_context("spawn")
    tasks = ((seed, faults) for seed in seeds)
    if fault:
        tasks = (task for task in tasks if has_fault(*task, fault))
    found = 0
    with context.Pool(processes, maxtasksperchild=400) as pool:
        # A few at a time: nothing is left to be done when there are enough.
        while some := list(islice(tasks, min(16 * processes, count - found))):
            for result in pool.imap_unordered(work, some):
                if isinstance(result, str):
                    lost[result[:60]] += 1
                    continue
                yield result
                found += 1
        pool.close()
        pool.join()
    for reason, times in lost.most_common(8):
        print(f"  no program: {times:5}  {reason}", file=sys.stderr)


def has_fault(seed: int, faults: int, name: str) -> bool:
    try:
        planted = wrong_program(seed, together=faults).faults
        return any(fault.name == name for fault in planted)
    except NoProgram:
        return False


def told(is_right: bool, kinds: collections.Counter, start: float) -> str:
    title = "right" if is_right else "wrong"
    spent = time.monotonic() - start
    return f"{title}: {kinds.total()} programs, {dict(kinds)}, {spent:.0f} s"


def main() -> int:
    options = parser().parse_args()
    if options.show is not None:
        program = (
            right_program(options.show)
            if options.of == "right"
            else wrong_program(options.show, together=options.together)
        )
        print(f"# {program.spec.fault or 'right'}: {program.spec}\n{program.text}")
        return 0
    status = 0
    for faults, count in ((0, options.right), (options.together, options.wrong)):
        if not count:
            continue
        start = time.monotonic()
        kinds: collections.Counter = collections.Counter()
        by_fault: dict[str, collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        seeds = range(options.seed, options.seed + 20 * count + 1000)
        for one in results(seeds, count, faults, options.processes, options.fault):
            kinds[one.kind] += 1
            by_fault[one.truth][one.kind] += 1
            if one.kind in options.list.split(",") or one.kind == "crashed":
                print(
                    f"{one.kind}\tseed {one.seed}\t{one.truth}\t{one.said}\t{one.style}"
                )
                sys.stdout.flush()
            if kinds.total() % _TOLD == 0:
                print(told(faults == 0, kinds, start), file=sys.stderr)
        print(told(faults == 0, kinds, start))
        for fault, counts in sorted(by_fault.items()):
            if faults and set(counts) - {"named"}:
                print(f"  {fault}: {dict(counts)}")
        status |= bool(kinds["accused"] or kinds["wrongly named"] or kinds["crashed"])
    return status
