# SPDX-License-Identifier: MIT
"""What a check may spend on searches for faults, as shares of the effort that the engine
allows for one search."""

import contextlib
from collections.abc import Iterator

LITTLE = 0.03  # tells single faults, and what masks mean
OF_ONE = 0.2  # of one search: hardly any fault needs more than 0.1
OF_FORM = 0.1  # of code in a form that is a guess, which others follow
OF_ALL = 0.6  # of all searches together
OF_PART = 0.3  # of code of which some calls are explained with a little
_LEAST = 0.05  # of a search when others have spent the rest
_QUICK = 0.2  # of a verdict, after which other numbers of heads are tried


class Effort:
    """spent: by all searches so far; allowed: to all of them."""

    def __init__(self) -> None:
        self.spent, self.allowed = 0.0, OF_ALL
        self._most = 1.0

    @contextlib.contextmanager
    def at_most(self, share: float) -> Iterator[None]:
        """Each search in this context has no more."""
        before, self._most = self._most, share
        try:
            yield
        finally:
            self._most = before

    def left(self, is_last: bool) -> float:
        """What a search has; is_last: only what has fewer faults would be believed."""
        rest = 0.0 if is_last else self.allowed - self.spent
        return min(max(rest, _LEAST), self._most)

    def was_quick(self, before: float) -> bool:
        """Whether little was spent since `before` had been."""
        return self.spent < before + _QUICK
