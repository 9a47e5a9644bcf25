"""Raises Python's recursion limit for deep trees, only while calls that need it are in progress.

    with restoring_limit():           # one call of ours; calls may be nested
        if not make_room(depth):    # the depth of a tree that JAX will flatten before the call ends
            raise DepthError(...)

JAX flattens trees by recursion, one step per level. Before Python 3.12 a step counts against the limit of
`sys.setrecursionlimit`, and since then against a limit for C code, which cannot be changed. If JAX fails because either
limit is hit, it never gives the steps back, and the thread can recurse no more. So a tree for which there is no *room*,
which means as many free steps as it has levels, must be refused before JAX sees it.

Before Python 3.12 raising the limit makes room. But the limit is that of all threads, and under a high limit an endless
recursion ends the process instead of raising an error. So it is raised only as far as the deepest tree needs, and the
last call to end restores the limit that the first one saw.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ._locks import Lock

C = TypeVar("C", bound=Callable[..., Any])

MAX_FLATTENED = 9_500
"""The largest depth of a tree that JAX is given. At 10,000 Python refuses; at 30,000 a thread's stack is full."""

# Up to this depth nothing is checked.
_SHALLOW = 100
# The depth of JAX's own calls between the check of a tree and its flattening.
_MARGIN = 200
# Some functions of JAX recurse in Python, too, as the one that `jax.vjp` returns: so many steps for each level, up to a
# bound.
_STEPS_PER_LEVEL, _MAX_STEPS = 8, 8_000

CAN_RAISE_LIMIT = sys.version_info < (3, 12)
"""Whether raising the recursion limit makes room in this version of Python."""


class _ThreadCalls(threading.local):
    num_calls = 0


active = _ThreadCalls()
"""`active.num_calls`: how many `restoring_limit` blocks are open in this thread."""

raised_depths: dict[int, int] = {}
"""Thread → the depth for which it needs a raised limit. Nearly always empty."""

_lock = Lock()

# Guarded by the lock. `_limit_before` is the limit that the program itself has set. `_limit_set` is the raised limit;
# it is 0 while the limit is not raised.
_limit_before = _limit_set = 0


class restoring_limit:  # noqa: N801 -- a context manager; one that is a generator costs a microsecond
    """A block in which `make_room` may raise the limit. The end of the thread's outermost block restores it."""

    __slots__ = ("_outer_calls",)

    def __enter__(self) -> None:
        self._outer_calls = active.num_calls
        active.num_calls = self._outer_calls + 1

    def __exit__(self, *_: object) -> None:
        active.num_calls = self._outer_calls
        if raised_depths:
            give_back()


def restores_limit(function: C) -> C:
    """Wraps a function so that each call is a `restoring_limit` block. From Python 3.12 on, returns it unchanged."""
    if not CAN_RAISE_LIMIT:
        return function

    @functools.wraps(function)
    def with_limit_restored(*args: Any, **kwargs: Any) -> Any:
        with restoring_limit():
            return function(*args, **kwargs)

    return with_limit_restored  # pyright: ignore[reportReturnType]


def make_room(depth: int) -> bool:
    """Raises the limit if that is possible and necessary. Returns True if JAX can flatten a tree of this depth now.

    The room lasts until the end of the outermost `restoring_limit` block in this thread.

    Cost: nothing up to a depth of 100; beyond, a microsecond for every two levels.
    """
    if depth <= _SHALLOW:
        return True
    if depth > MAX_FLATTENED:
        return False
    # The limit cannot be raised, or there is no block that would restore it. So only find out whether there is room.
    if not CAN_RAISE_LIMIT or not active.num_calls:
        return _is_room_for(depth + _MARGIN)
    thread = threading.get_ident()
    with _lock:
        # Entered even if there is room already, since another thread may have raised the limit, and may restore it.
        raised_depths[thread] = max(depth, raised_depths.get(thread, 0))
        _set_limit()
    # There may still be no room: the program may have recursed, through calls of ours, until near the raised limit.
    return _is_room_for(depth + _MARGIN)


def give_back() -> None:
    """Restores the limit, as far as other threads allow, if the outermost call of this thread has ended."""
    if not active.num_calls:
        with _lock:
            if raised_depths.pop(threading.get_ident(), None) is not None:
                _set_limit()


def _set_limit() -> None:
    """Sets the limit that the deepest entry of `raised_depths` needs. Restores the program's own if there is none.

    The caller holds the lock, or is the only thread.
    """
    global _limit_before, _limit_set  # noqa: PLW0603 -- only under the lock
    current = sys.getrecursionlimit()
    # Either the limit is not raised yet, or the program has set another one meanwhile. Both are the program's own.
    if current != _limit_set:
        _limit_before = current
    depth = max(raised_depths.values(), default=0)
    # The larger of two needs: JAX's recursion in C when it flattens, and that of its functions in Python.
    extra = max(depth + _MARGIN, min(_STEPS_PER_LEVEL * depth, _MAX_STEPS)) if depth else 0
    limit = _limit_before + extra
    # Python refuses a limit below the current depth of this thread. That happens if this thread has recursed into the
    # room that was made for another one. Then `_limit_set` stays as it is, and the next call to end tries again.
    with contextlib.suppress(RecursionError):
        if limit != current:
            sys.setrecursionlimit(limit)
        _limit_set = limit if raised_depths else 0


def _is_room_for(levels: int) -> bool:
    """Tries to recurse by so many levels. Returns False if that fails.

    It compares two nested lists. This recurses in C, as JAX does, but gives the steps back if it fails.
    """
    left: list[Any] = []
    right: list[Any] = []
    for _ in range(levels):
        left, right = [left], [right]
    try:
        return left == right
    except RecursionError:
        return False


def _drop_other_threads() -> None:
    """Restores the limit in the child of a fork, in which the other threads do not exist."""
    gone_threads = raised_depths.keys() - {threading.get_ident()}
    if gone_threads:
        for thread in gone_threads:
            del raised_depths[thread]
        _set_limit()


if CAN_RAISE_LIMIT and hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_other_threads)
