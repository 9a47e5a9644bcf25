"""The calls of each thread that are under way, and the recursion limit that holds until they end.

JAX flattens trees by recursion, one step for each level. Before Python 3.12 a step counts against the limit of
`sys.setrecursionlimit`, later against a limit of C alone, which nobody can change. Where either is hit, JAX never gives
the steps back, and the thread is left without any. So what has no room is to be refused before JAX sees it.

Before Python 3.12 room can be made by raising the limit. It is that of all threads, and with a high one an endless
recursion ends the process instead of raising. So it is raised by what the deepest tree needs, only while calls that
need it are under way, and the last of these to end puts back what the first one found:

    with keeping_limit():           # a call of ours, of which there may be several, one inside another
        if not make_room(depth):    # how deeply something is nested that JAX will flatten before the call ends
            raise DepthError(...)
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
"""How deeply nested is what JAX gets to flatten. At 10,000 Python refuses; at 30,000 a thread's stack is full."""

_SHALLOW = 100
# What JAX's own calls take between the place where a tree is looked at and the one where it is flattened.
_MARGIN = 200
# Some of its functions recurse in Python, too, as what `jax.vjp` returns does.
_STEPS, _MOST_STEPS = 8, 8_000
CAN_RAISE = sys.version_info < (3, 12)


class _Active(threading.local):
    num_calls = 0


active = _Active()
"""How many calls of this thread are under way."""

raised_depths: dict[int, int] = {}
"""The threads for which the limit is raised now, and for what depth each. Empty nearly always."""

_lock = Lock()
_limit_found = _limit_set = 0


class keeping_limit:  # noqa: N801 -- a context manager; one that is a generator costs a microsecond
    """A call that may make room."""

    __slots__ = ("_around",)

    def __enter__(self) -> None:
        self._around = active.num_calls
        active.num_calls = self._around + 1

    def __exit__(self, *_: object) -> None:
        active.num_calls = self._around
        if raised_depths:
            give_back()


def keeps_limit(function: C) -> C:
    """A function whose calls end with the recursion limit that they began with."""
    if not CAN_RAISE:
        return function

    @functools.wraps(function)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        with keeping_limit():
            return function(*args, **kwargs)

    return keeping  # pyright: ignore[reportReturnType]


def make_room(depth: int) -> bool:
    """Whether JAX can flatten something nested so deeply in the call that is under way.

    Cost: nothing, up to a depth of 100; beyond, a microsecond for each two levels.
    """
    if depth <= _SHALLOW:
        return True
    if depth > MAX_FLATTENED:
        return False
    if not CAN_RAISE or not active.num_calls:
        return _is_room_for(depth + _MARGIN)
    thread = threading.get_ident()
    with _lock:
        # Also where there is room already: it may be what another thread has raised, which goes at any time.
        raised_depths[thread] = max(depth, raised_depths.get(thread, 0))
        _set_limit()
    # There is none for who has recursed through calls of ours until even the raised limit is near.
    return _is_room_for(depth + _MARGIN)


def give_back() -> None:
    """Puts the limit back if the outermost call of this thread has ended and no other thread needs it any more."""
    if not active.num_calls:
        with _lock:
            if raised_depths.pop(threading.get_ident(), None) is not None:
                _set_limit()


def _set_limit() -> None:
    """Sets the limit to what all threads together need."""
    global _limit_found, _limit_set  # noqa: PLW0603 -- only under the lock
    now = sys.getrecursionlimit()
    if now != _limit_set:
        # It is the first to need it, or somebody else has set the limit meanwhile, and that holds from then on.
        _limit_found = now
    depth = max(raised_depths.values(), default=0)
    needed = _limit_found + (depth and max(depth + _MARGIN, min(_STEPS * depth, _MOST_STEPS)))
    # Python refuses a limit that this thread is beyond, which has used the room of others: the next to end sets it.
    with contextlib.suppress(RecursionError):
        if needed != now:
            sys.setrecursionlimit(needed)
        _limit_set = needed if raised_depths else 0


def _is_room_for(levels: int) -> bool:
    """Tries it, by a comparison that recurses in C as JAX does, and gives the steps back when it fails."""
    one: list[Any] = []
    other: list[Any] = []
    for _ in range(levels):
        one, other = [one], [other]
    try:
        return one == other
    except RecursionError:
        return False


def _start_anew() -> None:
    """In the child of a fork there are no other threads, which would need a raised limit."""
    own = threading.get_ident()
    if raised_depths.keys() - {own}:
        for thread in raised_depths.keys() - {own}:
            del raised_depths[thread]
        _set_limit()


if CAN_RAISE and hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
