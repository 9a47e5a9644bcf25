"""Static values that are equal without one being able to stand for the other.

Two of treeo's `Opaque` are equal if the types of what they hold are, so that a log or a step number in a static field
does not retrace. But a copy of a model must have the model's own log. So a structure knows each by the very object that
it holds, and only `jax.jit`, which asks whether it has a trace, gets their `==`.
"""

from collections.abc import Callable
from typing import Any

LOOSE: dict[type, Callable[[Any], Any]] = {}
"""Class → the object that an instance holds, which is not compared or copied. Empty unless treeo is in use."""


class _Received:
    """See `RECEIVED`."""

    def __repr__(self) -> str:
        return "RECEIVED"


RECEIVED = _Received()
"""Stands in a function's result for a loosely compared value that it received and did not replace."""


def without_received(aux: Any, received: Any) -> Any:
    """Auxiliary data with `RECEIVED` for each loosely compared value that is the one received at the same place."""
    if type(aux) is not dict or type(received) is not dict:
        return aux
    return {
        name: RECEIVED if _hold_one(value, received.get(name)) else value
        for name, value in aux.items()
    }  # fmt: skip


def _hold_one(value: Any, received: Any) -> bool:
    held = LOOSE.get(type(value))
    return held is not None and type(received) is type(value) and held(value) is held(received)
