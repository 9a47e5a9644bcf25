"""Raises Python's recursion limit for deep trees, only while calls that need it are in progress.

    with restoring_limit():           # one call of this package; such calls may be nested
        if not make_room(depth):      # the depth of a tree that JAX will flatten before the call ends
            raise DepthError(...)

JAX flattens trees by recursion, one step per level. Before Python 3.12 a step counts against the limit of
`sys.setrecursionlimit`. From 3.12 on it counts against a limit for C code, which cannot be changed. If JAX fails
because either limit is hit, the steps stay counted, and the thread can recurse no more. So a tree must be refused
before JAX sees it, unless there is *room* for it: as many free steps as it has levels.

Before Python 3.12, raising the limit makes room. But all threads have one limit, and under a high limit an endless
recursion crashes the process instead of raising an error. So the limit is raised only as far as the deepest tree needs.
The last call to end restores the limit that the program had before the first call.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ._locks import Lock

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_FLATTENED = 9_500
"""Largest depth of a tree that may reach JAX. At 10,000 Python raises an error; at 30,000 a thread's stack is full."""

# Up to this depth nothing is checked.
_SHALLOW = 100
# Steps that JAX's own calls take between the check of a tree and the flattening.
_MARGIN = 200
# Some functions of JAX recurse in Python, too, such as the one that `jax.vjp` returns. For each level of the tree they
# take so many steps of Python, but not more than a maximum.
_STEPS_PER_LEVEL, _MAX_STEPS = 8, 8_000

CAN_RAISE_LIMIT = sys.version_info < (3, 12)
"""True if raising the recursion limit makes room, in this version of Python."""


class _ThreadCalls(threading.local):
    """Count of each thread for itself. See `active`."""

    num_calls = 0


active = _ThreadCalls()
"""`active.num_calls` is the number of `restoring_limit` blocks that are open in this thread."""

raised_depths: dict[int, int] = {}
"""Thread → the depth of the deepest tree for which it needs a raised limit now. Nearly always empty."""

# Guards `raised_depths` and the two limits.
_lock = Lock()

# `_limit_before` is the limit that the program itself has set. `_limit_set` is the raised limit, as `_set_limit` below
# has set it. It is 0 while the limit is not raised.
_limit_before = _limit_set = 0


class restoring_limit:  # noqa: N801 -- a context manager; as a generator it would cost a microsecond more
    """Block in which `make_room` may raise the limit. At the end of the thread's outermost block the limit is restored.

    If another thread still needs a raised limit, it is lowered only as far as this allows.
    """

    __slots__ = ("_outer_calls",)

    def __enter__(self) -> None:
        self._outer_calls = active.num_calls
        active.num_calls = self._outer_calls + 1

    def __exit__(self, *_: object) -> None:
        active.num_calls = self._outer_calls
        if raised_depths:
            lower_limit()


def restores_limit(function: Function) -> Function:
    """Wraps a function so that each call is a `restoring_limit` block. From Python 3.12 on, returns it unchanged."""
    if not CAN_RAISE_LIMIT:
        return function

    @functools.wraps(function)
    def with_limit_restored(*args: Any, **kwargs: Any) -> Any:
        with restoring_limit():
            return function(*args, **kwargs)

    return with_limit_restored  # pyright: ignore[reportReturnType]


def make_room(depth: int) -> bool:
    """Makes sure that JAX can flatten a tree of this depth. Raises the limit if that is possible and necessary.

    The room lasts until the end of the outermost `restoring_limit` block in this thread.

    Returns:
        True if there is room now. False if JAX must not see the tree.

    Cost: nothing up to a depth of 100; beyond, a microsecond for every two levels.
    """
    if depth <= _SHALLOW:
        return True
    if depth > MAX_FLATTENED:
        return False
    # If the limit cannot be raised, or there is no block that would restore it, only find out whether there is room.
    if not CAN_RAISE_LIMIT or not active.num_calls:
        return _is_room_for(depth + _MARGIN)
    thread = threading.get_ident()
    with _lock:
        # The depth is entered even if there is room already. The limit may be high only because another thread has
        # raised it, and that thread may restore it before JAX is done here.
        raised_depths[thread] = max(depth, raised_depths.get(thread, 0))
        _set_limit()
    # There may still be no room: a program that recurses through calls of this package may be near the raised limit.
    return _is_room_for(depth + _MARGIN)


def lower_limit() -> None:
    """Restores the limit, as far as other threads allow, if no `restoring_limit` block is open in this thread."""
    if not active.num_calls:
        with _lock:
            if raised_depths.pop(threading.get_ident(), None) is not None:
                _set_limit()


def _set_limit() -> None:
    """Sets the limit that the deepest entry of `raised_depths` needs. Without an entry, restores the program's limit.

    The caller holds the lock, or is the only thread, as after a fork.
    """
    global _limit_before, _limit_set  # noqa: PLW0603 -- only under the lock
    current = sys.getrecursionlimit()
    # `_limit_set` is the limit that this file has set, or 0. Any other limit is one that the program itself has set.
    if current != _limit_set:
        _limit_before = current
    depth = max(raised_depths.values(), default=0)
    # The larger of two needs: that of JAX's recursion in C, when it flattens, and that of its functions in Python.
    extra = max(depth + _MARGIN, min(_STEPS_PER_LEVEL * depth, _MAX_STEPS)) if depth else 0
    limit = _limit_before + extra
    # Python raises an error for a limit below the current depth of this thread. That happens if this thread has
    # recursed into the room that was made for another thread. Then the limit and `_limit_set` stay as they are, until
    # an entry of `raised_depths` is next added or removed.
    with contextlib.suppress(RecursionError):
        if limit != current:
            sys.setrecursionlimit(limit)
        _limit_set = limit if raised_depths else 0


def _is_room_for(levels: int) -> bool:
    """Tries to recurse by this number of levels. Returns False if that fails.

    It compares two nested lists. Like JAX, this recurses in C. Unlike JAX, it leaves no steps counted if it fails.
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
    """Removes the entries of the other threads, and restores the limit. Called in the child process of a fork.

    Only the thread that called `fork` goes on in the child, so the others will never remove their entries.
    """
    gone_threads = raised_depths.keys() - {threading.get_ident()}
    if gone_threads:
        for thread in gone_threads:
            del raised_depths[thread]
        _set_limit()


if CAN_RAISE_LIMIT and hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_other_threads)
