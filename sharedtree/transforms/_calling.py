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
        call: the packed arguments, and the objects that they were packed from.
        outer: the traces that were active when the call began.
    """

    call: Call
    outer: Sequence[Any]


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Calling | tuple[Sequence[Any], dict[str, Any]]] = []


active = _Active()
"""The calls of this thread, innermost last. One that a plan has packed has only its arguments there."""


@contextlib.contextmanager
def calling(call: Call) -> Iterator[None]:
    """Lets the function know, should it be traced, of the caller's side of this call."""
    active.stack.append(Calling(call, current_traces()))
    try:
        yield
    finally:
        active.stack.pop()
