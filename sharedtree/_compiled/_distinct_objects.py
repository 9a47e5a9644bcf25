"""Whether the objects in some lists are all different ones.

The set of their ids says so, at about 80 ns an object: an integer and a hash entry for each. CPython's reference
counts say it for a quarter of that. An object that was read at a place that holds it, a field or an item, is held by
that place and by the list; one that was read at two is held by the list twice, and so counts one more at least. Counts
that are higher for another reason, say a weight that the caller keeps in a variable too, prove nothing, and then the
ids are asked.

Where counts are not exact, as in free-threaded Python, the ids are always asked.
"""

import sys
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any


def all_different(lists: Iterable[Sequence[Any]]) -> bool:
    """Whether no object is in these lists twice. Cost: an integer for each object."""
    ids = [id(obj) for objects in lists for obj in objects]  # all alive in the lists
    return len(set(ids)) == len(ids)


def count_references(objects: Sequence[Any]) -> list[int]:
    """The reference count of each object, as generated code asks for it."""
    return list(map(sys.getrefcount, objects))


def _calibrate() -> tuple[int, int]:
    held = [object(), object()]
    (alone, _), (once, _) = count_references(held), count_references([*held])
    twice, _ = count_references([held[0], held[0]])
    is_exact = not sysconfig.get_config_var("Py_GIL_DISABLED")
    return (alone, once) if is_exact and alone < once < twice else (-1, -1)


ALONE, ONCE = _calibrate()
"""The count of an object that only the list holds, and of one that one more place holds; -1 if not to be relied on."""
