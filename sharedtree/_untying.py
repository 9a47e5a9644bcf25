"""Which ties were undone on purpose, so that their loss is not reported.

Inside a function that is being traced they are known by their paths, since updates before and after `untie` make other
tracers. Outside they are known by the copies that `untie` made.
"""

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Noted = Collection[tuple[str, str]]
"""Ties, each named by two paths from the root of the tree that was given to `untie`."""


class _Meant(threading.local):
    def __init__(self) -> None:
        self.stack: list[set[tuple[str, str]]] = []
        self.copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


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


def note_untied(ties: Iterable[tuple[str, str]], copies: Iterable[Any]) -> None:
    """Says that these ties were meant to go, and what `untie` copied for that."""
    if _meant.stack:
        _meant.stack[-1].update(ties)
    for copy in copies:
        try:
            _meant.copies[id(copy)] = copy  # the entry goes when the copy does
        except TypeError:  # an object without weak references, such as a `jax.ShapeDtypeStruct`
            continue


def is_untied_copy(obj: Any) -> bool:
    """Whether an array was made by `untie`, in this thread."""
    return _meant.copies.get(id(obj)) is obj  # the dictionary holds what is alive


def was_meant(lost: tuple[str, str], noted: Noted) -> bool:
    """Whether a lost tie was noted. The trees may have different roots, so one path may be the end of the other."""
    return any(all(a.endswith(b) or b.endswith(a) for a, b in zip(lost, tie, strict=True)) for tie in noted)
