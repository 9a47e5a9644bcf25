"""The calls of wrapped functions that are under way, for the function should it be traced in one of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax_internals import current_trace, with_enclosing
from .._under_way import active, give_back, raised
from ._packing import Call


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


class calling:  # noqa: N801 -- a context manager; one that is a generator costs a microsecond
    """Lets the function know, should it be traced, of the caller's side of this call."""

    __slots__ = ("_depth", "_entry")

    def __init__(self, owner: Any, call: Call) -> None:
        self._entry = owner, call, current_trace()
        self._depth = len(active.stack)

    def __enter__(self) -> None:
        active.stack.append(self._entry)

    def __exit__(self, *_: object) -> None:
        # An interrupt may come at any point; what is above this call is then gone too.
        del active.stack[self._depth :]
        if raised:
            give_back()


def caller_of(owner: Any) -> Calling | None:
    """The innermost call of an owner; None if none is under way in this thread.

    A transform may call the function after the call has returned, in another thread, or from within another call.
    """
    for its, call, trace in reversed(active.stack):
        if its is owner:
            return Calling(owner, Call(*call), with_enclosing(trace))
    return None
