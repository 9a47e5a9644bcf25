"""What is not traced is part of the structure, and is compared strictly: by type and by value.

`1`, `True` and `1.0` differ, `0.0` and `-0.0` differ, `nan` equals itself, arrays compare by dtype, shape and bytes.
What can be mutated is copied when the `Static` is made, so that a later mutation is seen as the difference that it
is, and copied again for each trace that gets it, so that no trace can change another's.
"""

import functools
import importlib
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ._class_attributes import dataclass_fields
from ._libraries import parts_of_frozen
from ._printing import shown
from ._static_copies import IMMUTABLE, can_be_mutated, compares_as_module, compares_by_field, copy_of, has_own_hash
from ._static_keys import Known, key_of, nothing_known

_FIXED = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)  # and all their kinds


class Static:
    """A value that is compared strictly and cannot be changed from outside.

    Args:
        value: anything that has `==`; it need not be hashable.
        known: what other `Static`s of the same walk found out about the objects in it.

    Raises:
        Incomparable: if the value, or something in it, has no usable `==`.

    Two `Static`s are equal if their values have the same type and content. Cost: one walk over the containers in
    `value`, and a copy of those that can be mutated.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_value")

    def __init__(self, value: Any, known: Known | None = None) -> None:
        self._key, is_mutable = key_of(value, known)
        self._is_mutable = bool(is_mutable)
        self._value = value
        if is_mutable:
            known = nothing_known() if known is None else known
            known.alive.append(value)
            self._value = copy_of(value, known.copies)
            # Another thread may have changed the value before it was copied, and only the copy stays what it is.
            self._key = key_of(self._value, known)[0]
        self._hash = hash(self._key)

    def thaw(self) -> Any:
        """The value: itself if it is immutable, else a copy that the caller owns."""
        return copy_of(self._value, {}) if self._is_mutable else self._value

    @property
    def is_mutable(self) -> bool:
        """Whether the value, or anything in it, could be changed by whoever has it."""
        return self._is_mutable

    @property
    def is_settled(self) -> bool:
        """Whether the same object has the same value for ever, so that `is` is enough to know it again."""
        return not self._is_mutable and cannot_change(self._value)

    def peek(self) -> Any:
        """The value, not to be changed and not to be handed to users."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Static({shown(self._value)})"

    def __reduce__(self) -> Any:
        return Static, (with_names(self._value),)


def shown_beside(value: Any, other: Any) -> str:
    """A value as errors print it beside another one: if both print alike, the first part of it that differs."""
    while shown(value) == shown(other):
        if isinstance(value, dict):
            value, other = tuple(value.items()), tuple(other.items())
        if not isinstance(value, (tuple, list)) or type(other) is not type(value):
            break
        if len(value) != len(other):
            return f"{shown(value)}, {len(value)} of them"
        differing = [pair for pair in zip(value, other, strict=True) if Static(pair[0]) != Static(pair[1])]
        if not differing:
            break
        value, other = differing[0]
    return shown(value)


class _ByName:
    """Stands in a pickle for an object that a name leads to. `jax.nn.relu` is no plain function, so pickle asks it."""

    def __init__(self, module: str, name: str) -> None:
        self.name = module, name

    def __reduce__(self) -> Any:
        return _named, self.name


def _named(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def with_names(value: Any) -> Any:
    """A value with names in place of the functions of libraries, as far as tuples lead to them.

    Plain functions and classes, and whatever is in `__main__`, are left to the pickler, which may know better.
    """
    if type(value) is tuple:
        return tuple([with_names(part) for part in value])
    if not callable(value) or isinstance(value, (type, types.FunctionType)):
        return value
    module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    try:
        found = operator.attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return value
    return _ByName(module, name) if found is value and module != "__main__" else value


class _Looked:
    """A value that was looked at, and what is in it that was not yet."""

    __slots__ = ("is_settled", "parts", "value")

    def __init__(self, value: Any) -> None:
        parts = _parts_of(value)
        self.value = value
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


Settled = dict[int, _Looked]
"""By id, which of the values of a walk were found to stay the same. They are kept alive here."""


def cannot_change(value: Any, known: Settled | None = None) -> bool:
    """Whether the same object has the same value for ever.

    A `functools.partial` and a frozen dataclass could be changed, but nobody does. What the fields of the latter hold
    is asked, too, unless its class has a hash of its own, which only what stays the same can have.

    Args:
        value: of any kind.
        known: what was found out about others.
    """
    known = {} if known is None else known
    stack = [value]
    while stack:
        found = known.get(id(stack[-1]))  # alive there
        if found is None:
            found = known[id(stack[-1])] = _Looked(stack[-1])  # as above
            stack.extend(found.parts)
            continue
        stack.pop()
        # One that holds itself is still open where it is met again, and what it holds decides.
        found.is_settled = found.is_settled and all(known[id(part)].is_settled for part in found.parts)  # as above
        found.parts = ()
    return known[id(value)].is_settled  # as above


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What a value is made of that itself cannot change; None if it can, or nothing is known of it."""
    cls: type = type(value)
    if cls in IMMUTABLE or is_known_by_address(cls) or issubclass(cls, np.generic):
        return ()
    if cls is tuple or cls is frozenset or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return value
    if cls is slice:
        return value.start, value.stop, value.step
    if cls is functools.partial:
        return value.func, *value.args, *value.keywords.values()
    if compares_by_field(cls) and not can_be_mutated(cls):
        if has_own_hash(cls):
            return ()
        return [getattr(value, field.name) for field in dataclass_fields(cls) if hasattr(value, field.name)]
    if compares_as_module(cls):
        return object.__getattribute__(value, "__dict__").values()
    return parts_of_frozen(value)


def is_known_by_address(cls: type) -> bool:
    """Whether each instance of a class has one value for ever, and is likely to be the same object when met again."""
    if cls is functools.partial:  # which is compared by what is in it
        return False
    return cls is type or cls.__eq__ is object.__eq__ or issubclass(cls, _FIXED)
