"""Copies of what in a value can be mutated, so that nobody can change what was compared.

What cannot be mutated is shared with the original. One object in a value is one object in its copy, so a copy takes as
long as there are objects, however many paths lead to them.
"""

import collections
import copy
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._class_attributes import dataclass_fields

IMMUTABLE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), float, complex, type, range})
_CONTAINERS = (list, dict, set, bytearray, collections.deque, np.ndarray)


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or cannot be hashed or copied."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


def compares_by_field(cls: Any) -> bool:
    """Whether a class is a dataclass whose `==` was generated: it compares `1` and `True`, which differ here."""
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def has_own_hash(cls: Any) -> bool:
    """Whether a class has a hash that was not generated: who says so says that its instances stay what they are."""
    code = getattr(cls.__dict__.get("__hash__"), "__code__", None)
    return code is not None and code.co_filename != "<string>"


def compares_as_module(cls: Any) -> bool:
    """Whether a class is an Equinox module whose `==` is Equinox's, which has JAX flatten both, path by path."""
    return issubclass(cls, eqx.Module) and cls.__eq__ is eqx.Module.__eq__


def can_be_mutated(cls: Any) -> bool:
    """Whether a class is known for instances that change, hashable or not."""
    return issubclass(cls, _CONTAINERS) or (compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of whatever in a value can be mutated; the rest is shared.

    Args:
        value: the value.
        memo: id → copy, as `copy.deepcopy` has it, of what belongs to one value, which keeps it alive.
    """
    if type(value) in IMMUTABLE:
        return value
    if isinstance(value, jax.Array) and not isinstance(value, jax.Ref):
        return value
    if id(value) not in memo:  # alive: see above
        memo[id(value)] = _new_copy(value, memo)  # alive: see above
    return memo[id(value)]  # alive: see above


def _new_copy(original: Any, memo: dict[int, Any]) -> Any:
    value: Any = original
    cls: Any = type(value)
    if cls is list or cls is set:
        return cls(copy_of(x, memo) for x in value)
    if cls is tuple:
        return tuple([copy_of(x, memo) for x in value])
    if cls is slice:
        return slice(copy_of(value.start, memo), copy_of(value.stop, memo), copy_of(value.step, memo))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return cls(*[copy_of(x, memo) for x in value])
    if cls is dict or cls is collections.OrderedDict:
        return cls((k, copy_of(v, memo)) for k, v in value.items())
    if cls is collections.defaultdict:
        return cls(value.default_factory, {k: copy_of(v, memo) for k, v in value.items()})
    if cls is collections.deque:
        return cls((copy_of(x, memo) for x in value), value.maxlen)
    if cls is bytearray or cls is np.ndarray:
        return value.copy()
    if cls is functools.partial:
        args, keywords = copy_of(value.args, memo), copy_of(value.keywords, memo)
        return functools.partial(copy_of(value.func, memo), *args, **keywords)
    if compares_by_field(cls) and not can_be_mutated(cls):
        return value if has_own_hash(cls) else _copy_of_frozen(value, memo)
    if compares_as_module(cls) or (not can_be_mutated(cls) and is_hashable(value)):
        return value
    try:
        # In a trace, copies of the arrays in it would be tracers.
        with jax.ensure_compile_time_eval():
            return copy.deepcopy(value, memo)
    except Exception as error:  # noqa: BLE001 -- whatever a user's __deepcopy__ raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_of_frozen(value: Any, memo: dict[int, Any]) -> Any:
    """Asking whether a frozen dataclass can be hashed would walk all paths below it."""
    there = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    copies = {name: copy_of(getattr(value, name), memo) for name in there}
    if all(_is_alike(getattr(value, name), copies[name]) for name in there):
        return value
    made = copy.copy(value)
    for name, each in copies.items():
        object.__setattr__(made, name, each)
    return made


def _is_alike(value: Any, its_copy: Any) -> bool:
    """Whether a copy holds the same objects: a tuple of what cannot be mutated is as good as its copy."""
    if value is its_copy:
        return True
    is_tuple = type(value) is tuple and type(its_copy) is tuple
    return is_tuple and all(a is b for a, b in zip(value, its_copy, strict=True))
