"""What a module of Equinox has of the function that it wraps: a name, documentation and annotations of its own.

`equinox.module_update_wrapper` copies them. Texts in annotations are evaluated by whoever asks for the types that they
name. So a file has no annotations: it says from which field a reader is to copy them again, as far as they are equal.
"""

import functools
from collections.abc import Sequence
from typing import Any

from ...core._class_attributes import ABSENT, dict_descriptor
from ...core._node_types import without_missing
from ...libraries._equinox import WRAPPER_ATTRIBUTES
from ..trust._buildable_classes import kind_of

WRITTEN_ATTRIBUTES = frozenset(WRAPPER_ATTRIBUTES) - {"__annotations__"}
"""Those of them that a file may hold."""


def wrapped_field(fields: Sequence[str], attributes: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The field from whose value a reader is to copy, as `module_update_wrapper` did, and which attributes those are.

    A module may have a name of its own since then, which is written. Its annotations are not, so they must be the same.
    """
    best: tuple[str | None, tuple[str, ...]] = None, ()
    if "__module__" not in attributes:
        return best
    own = {name: attributes[name] for name in WRAPPER_ATTRIBUTES if name in attributes}
    for field in fields:
        there = wrapped_attributes(attributes[field]) if field in attributes else {}
        same = tuple([name for name in own if name in there and there[name] == own[name]])
        is_wrapped = there.keys() <= own.keys() and ("__annotations__" in same or len(same) == len(own))
        if is_wrapped and len(same) > len(best[1]):
            best = field, same
    return best


def copy_wrapped_attributes(obj: Any, wrapped: Any) -> None:
    """Copies into a module what `equinox.module_update_wrapper` does. What the module has of its own stays."""
    own = dict_descriptor(type(obj)).__get__(obj)
    own.update({name: value for name, value in wrapped_attributes(wrapped).items() if name not in own})


def wrapped_attributes(wrapped: Any) -> dict[str, Any]:
    """What is copied from a wrapped object into the module that wraps it.

    An instance of a class, or a partial, may be of a file's making: its attributes are read from dictionaries, so that
    no property, no `__getattr__` and nothing that the file put there is run.
    """
    cls = type(wrapped)
    if kind_of(cls) is None and not issubclass(cls, functools.partial):
        found = {name: getattr(wrapped, name, ABSENT) for name in WRAPPER_ATTRIBUTES}
        return {name: value for name, value in found.items() if value is not ABSENT}
    dictionaries = [type.__getattribute__(base, "__dict__") for base in reversed(type.__getattribute__(cls, "__mro__"))]
    own = [without_missing(held["__dict__"].__get__(wrapped)) for held in dictionaries if "__dict__" in held]
    found = {name: held[name] for held in (*dictionaries, *own[-1:]) for name in WRAPPER_ATTRIBUTES if name in held}
    return {name: value for name, value in found.items() if value is None or type(value) in (str, dict)}
