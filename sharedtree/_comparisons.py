"""How static values of some classes are compared, whose `==` does not say whether one can stand for the other.

Two kinds, both of which `sharedtree.compat` enters for treeo:

- *By content.* A `FieldMetadata` has no `==`, so a copy of one would be another structure, and a retrace.
- *Loosely.* Two `Opaque` are equal if the types of their values are, so that a log or a step number in a static field
  does not retrace. But one cannot stand for the other: a copy of a model must have the model's own log. So a structure
  knows each by the very object that it holds, and only `jax.jit`, which asks whether it has a trace, gets their `==`.

Both are empty unless treeo is in use.
"""

from collections.abc import Callable, Sequence
from typing import Any

BY_CONTENT: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""Class → what its instances are compared by. They are not copied, so they must not change."""

LOOSE: dict[type, Callable[[Any], Any]] = {}
"""Class → the object that an instance holds. Nothing in that is compared or copied."""


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
