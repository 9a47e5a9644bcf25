"""Which arrays at two paths of a tie are the whole gradient of it, and not each path's share.

A rule of `custom_vjp` that is right for an untied model may return one array at two paths, for each its share:

    return (Two(g, g),)

What differentiation makes of a tie is one array at two paths as well, and is the sum of the shares. Only who made it
can tell. So while a rule runs, what makes such arrays leaves word of them: gradients, pullbacks and `retie`; and what
makes new leaves of these hands that on.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..core._structure import Record, at_several_paths


class Whole:
    """The arrays that were said to be whole while one rule ran."""

    def __init__(self) -> None:
        self._leaves: dict[int, Any] = {}

    def add(self, leaf: Any) -> None:
        """Says it of one."""
        self._leaves[id(leaf)] = leaf  # which keeps it alive

    def __contains__(self, leaf: object) -> bool:
        return id(leaf) in self._leaves  # as above


class _Rules(threading.local):
    def __init__(self) -> None:
        self.stack: list[Whole] = []


_rules = _Rules()  # a rule runs in one thread, and so does what it calls


@contextmanager
def noting_whole() -> Iterator[Whole]:
    """Collects what is said inside the block, which calls a rule."""
    whole = Whole()
    _rules.stack.append(whole)
    try:
        yield whole
    finally:
        _rules.stack.pop()


def note_tied(records: Sequence[Record], roots: Iterable[int], leaves: Mapping[int, Any]) -> None:
    """Says it of the leaves to which several paths lead, inside a rule.

    Args:
        records: of a gradient.
        roots: where its paths begin.
        leaves: record → leaf.
    """
    if _rules.stack:
        for number in at_several_paths(records, roots) & leaves.keys():
            _rules.stack[-1].add(leaves[number])


def hand_on(old: Iterable[Any], new: Iterable[Any]) -> None:
    """Says of each new leaf what was said of the old one."""
    if _rules.stack:
        for before, leaf in zip(old, new, strict=True):
            if any(before in whole for whole in _rules.stack):
                _rules.stack[-1].add(leaf)
