# SPDX-License-Identifier: MIT
"""Code that pools: it returns a vector for each item, of a query of its own, a learned
one or the mean of all positions. Nothing tells what it should ask, so that only its heads
are judged, and it is called so where it takes no call as attention does."""

from .first_call import FirstCall
from .refused import mixes_items
from .ways import Way


def ways(first: FirstCall) -> list[tuple[int, Way]]:
    """The way to call it, if that comes to its end and has heads; it has one fault, or
    none that is known."""
    if first.ended is None or first.ended[1].pooled is None:
        return []
    runner, run = first.ended
    if mixes_items(runner, run):
        return []
    runner.takes_pools = True
    base = runner.run(run.case)
    if not base.refused and base.recorder.cores.found:
        return [(1, Way(runner, base, pools=run.findings[0]))]
    runner.takes_pools = False
    return []
