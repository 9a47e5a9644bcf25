"""Which ties were undone on purpose, so that their loss is not reported."""

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

Noted = Collection[tuple[str, str]]
"""Ties, each named by two paths from the root of the tree that was given to `untie`."""


class _Meant(threading.local):
    def __init__(self) -> None:
        self.stack: list[set[tuple[str, str]]] = [set()]


_meant = _Meant()


@contextmanager
def noting_untied() -> Iterator[Noted]:
    """Collects the ties that `untie` undoes inside the block, in this thread."""
    noted: set[tuple[str, str]] = set()
    _meant.stack.append(noted)
    try:
        yield noted
    finally:
        _meant.stack.pop()


def noted_so_far() -> Noted:
    """The ties that `untie` has undone in this thread since it began."""
    return _meant.stack[0]


def note_untied(ties: Iterable[tuple[str, str]]) -> None:
    """Says that these ties were meant to go."""
    ties = set(ties)
    for noted in _meant.stack:
        noted |= ties


def was_meant(lost: tuple[str, str], noted: Noted) -> bool:
    """Whether a lost tie was noted. The trees may have different roots, so one path may be the end of the other."""
    return any(all(a.endswith(b) or b.endswith(a) for a, b in zip(lost, tie, strict=True)) for tie in noted)
