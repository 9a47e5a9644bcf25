"""The calls of wrapped functions that are under way, for the function should it be traced in one of them."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax_internals import current_traces
from ._crossing import Call


class Calling(NamedTuple):
    """The caller's side of a call, for the function should it be traced.

    Attributes:
        owner: who called: what the wrappers of one function have in common.
        call: the packed arguments, and the objects that they were packed from.
        outer: the traces that were active when the call began.
    """

    owner: Any
    call: Call
    outer: Sequence[Any]


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Calling] = []


_active = _Active()


class calling:  # noqa: N801 -- a context manager; one that is a generator costs a microsecond
    """Lets the function know, should it be traced, of the caller's side of this call."""

    __slots__ = ("_call", "_depth")

    def __init__(self, owner: Any, call: Call) -> None:
        self._call = Calling(owner, call, current_traces())
        self._depth = len(_active.stack)

    def __enter__(self) -> None:
        _active.stack.append(self._call)

    def __exit__(self, *_: object) -> None:
        # An interrupt may come at any point; what is above this call is then gone too.
        del _active.stack[self._depth :]


def caller_of(owner: Any) -> Calling | None:
    """The innermost call of an owner; None if none is under way in this thread.

    A transform may call the function after the call has returned, in another thread, or from within another call.
    """
    return next((call for call in reversed(_active.stack) if call.owner is owner), None)
