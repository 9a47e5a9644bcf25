"""The calls of wrapped functions that are under way, for the function should it be traced in one of them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
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
        self.stack: list[Calling | tuple[Any, Sequence[Any], dict[str, Any]]] = []


active = _Active()
"""The calls of this thread, innermost last. One that a plan has packed is (owner, arguments, keyword arguments)."""


@contextlib.contextmanager
def calling(owner: Any, call: Call) -> Iterator[None]:
    """Lets the function know, should it be traced, of the caller's side of this call."""
    stack = active.stack
    depth = len(stack)
    # An interrupt may come at any point; what is above this call is then gone too.
    try:
        stack.append(Calling(owner, call, current_traces()))
        yield
    finally:
        del stack[depth:]


def caller_of(owner: Any) -> int | None:
    """Where in the stack the innermost call of an owner is; None if it is not under way in this thread.

    A transform may call the function after the call has returned, in another thread, or from within another call.
    """
    stack = active.stack
    return next((i for i in reversed(range(len(stack))) if stack[i][0] is owner), None)
