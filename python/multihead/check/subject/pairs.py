# SPDX-License-Identifier: MIT
"""Parameters that come in pairs: numbered ones, v1, mask1, v2, mask2, of two sequences and
their masks; height and width."""

import inspect

from .roles import TENSORS, normal

_EMPTY = inspect.Parameter.empty


def roles_of_pairs(
    parameters: list[inspect.Parameter], roles: dict[str, str | None]
) -> dict[str, str | None]:
    """The first of two asks, and the mask of the second is one of keys; nothing where
    names say more, or there are more than two."""
    free = [
        p.name
        for p in parameters
        if p.default is _EMPTY
        and roles[p.name] in (None, *TENSORS)
        and "mask" not in p.name.lower()
    ]
    firsts = [n for n in free if n.endswith("1") and n[:-1] + "2" in free]
    named = [n for n in free if not n[-1:].isdigit()]
    if len(firsts) != 1 or named or firsts[0][:-1] + "3" in roles:
        return {}
    found: dict[str, str | None] = {}
    own = firsts[0][:-1]
    for number, sequence, mask in (
        ("1", "x", "query_mask"),
        ("2", "context", "padding"),
    ):
        found[own + number] = sequence
        masks = {f"{own}{number}_mask", f"mask{number}", f"{own}_mask{number}"}
        masks |= {f"mask_{own}{number}", f"mask_{number}"}
        found |= dict.fromkeys(masks & roles.keys(), mask)
    return found


_SIDES = {"rows": ("h", "height", "hh"), "columns": ("w", "width", "ww")}


def roles_of_sides(roles: dict[str, str | None]) -> dict[str, str | None]:
    """Height and width, which come together, are those of an image whose pixels are
    the sequence: h alone may count heads, and w be a weight."""
    sides: dict[str, str | None] = {
        name: role
        for role, names in _SIDES.items()
        for name in roles
        if normal(name) in names
    }
    return sides if len(set(sides.values())) == 2 else {}
