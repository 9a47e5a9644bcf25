"""What is not traced is part of the structure, and is compared strictly: by type and by value.

`1`, `True` and `1.0` differ, `0.0` and `-0.0` differ, `nan` equals itself, arrays compare by dtype, shape and bytes.
What can be mutated is copied when the `Static` is made, so that a later mutation is seen as the difference that it
is, and copied again for each trace that gets it, so that no trace can change another's.
"""

import collections
import copy
import dataclasses
import functools
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented)})
"""The types whose instances are alike exactly if they have the same type and are equal."""

_IMMUTABLE = frozenset({*BY_VALUE, float, complex, type, range})
_FIXED = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)  # and all their kinds


class Static:
    """A value that is compared strictly and cannot be changed from outside.

    Args:
        value: anything that has `==`; it need not be hashable.

    Raises:
        Incomparable: if the value, or something in it, has no usable `==`.

    Two `Static`s are equal if their values have the same type and content. Cost: one walk over the containers in
    `value`, and a copy of those that can be mutated.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_original", "_value")

    def __init__(self, value: Any) -> None:
        is_mutable: list[bool] = []
        self._key = _key_of(value, is_mutable)
        self._is_mutable = bool(is_mutable)
        self._original = value if is_mutable and not any(is_mutable) else None
        self._value = _copy(value) if is_mutable else value
        self._hash = hash(self._key)

    def thaw(self) -> Any:
        """The value: itself if it is immutable, else a copy that the caller owns.

        A `functools.partial` has keywords that could be changed, though nobody does, and is equal only to itself; so it
        is handed out itself as long as it is what it was.
        """
        if self._original is not None and _key_of(self._original, []) == self._key:
            return self._original
        return _copy(self._value) if self._is_mutable else self._value

    @property
    def is_mutable(self) -> bool:
        """Whether the value, or anything in it, could be changed by whoever has it."""
        return self._is_mutable

    @property
    def is_settled(self) -> bool:
        """Whether the same object has the same value for ever, so that `is` is enough to know it again."""
        return not self._is_mutable and _is_settled(self._value)

    def peek(self) -> Any:
        """The value, not to be changed and not to be handed to users."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Static({self._value!r})"


class _Identity:
    """Equal only to the same object, which it keeps alive: tracers and references have no other equality."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is _Identity and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _ByEquality:
    """Any other object: same type and `==`. The same object is equal to itself only where it cannot have changed."""

    __slots__ = ("is_hashable", "obj")

    def __init__(self, obj: Any, is_hashable: bool) -> None:
        self.obj = obj
        self.is_hashable = is_hashable

    def __eq__(self, other: object) -> bool:
        if type(other) is not _ByEquality or type(self.obj) is not type(other.obj):
            return False
        return self.obj is other.obj or bool(self.obj == other.obj)

    def __hash__(self) -> int:
        return hash(self.obj) if self.is_hashable else hash(type(self.obj))


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or cannot be hashed or copied."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


def _is_settled(value: Any) -> bool:
    cls: type = type(value)
    if cls is tuple or cls is frozenset or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return all(map(_is_settled, value))
    if cls is slice:
        return all(map(_is_settled, (value.start, value.stop, value.step)))
    return cls in _IMMUTABLE or cls.__eq__ is object.__eq__ or isinstance(value, _FIXED)


def _require_equality(value: Any) -> None:
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


def _key_of(value: Any, is_mutable: list[bool]) -> Any:
    cls: Any = type(value)
    if cls in BY_VALUE:
        return cls, value
    if cls is float:
        return cls, struct.pack("d", value)
    if cls is complex:
        return cls, struct.pack("dd", value.real, value.imag)
    if cls is slice:
        return cls, tuple(_key_of(x, is_mutable) for x in (value.start, value.stop, value.step))
    if isinstance(value, tuple):
        return cls, _key_of_sequence(value, is_mutable)
    if isinstance(value, frozenset):
        return cls, frozenset(_key_of(x, is_mutable) for x in value)
    if cls is functools.partial:
        is_mutable.append(False)  # but for its keywords, which nobody changes: see `thaw`
        parts = (value.func, value.args, value.keywords)
        return cls, *(_key_of(part, is_mutable) for part in parts[:2]), _key_of_items(parts[2], is_mutable)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, _Identity(value)
    if isinstance(value, jax.Array):
        return _key_of_jax_array(value)
    for base, snapshot in _MUTABLE.items():
        if isinstance(value, base):
            is_mutable.append(True)
            return cls, snapshot(value, is_mutable)
    if _compares_by_field(cls):
        if _can_be_mutated(cls):
            is_mutable.append(True)
        compared = [f.name for f in dataclasses.fields(cls) if f.compare and hasattr(value, f.name)]  # or was never set
        return cls, tuple((name, _key_of(getattr(value, name), is_mutable)) for name in compared)
    _require_equality(value)
    if _is_hashable(value):
        return cls, _ByEquality(value, is_hashable=True)
    is_mutable.append(True)
    return cls, _ByEquality(_copy(value), is_hashable=False)


def _key_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


def _key_of_numpy_array(value: np.ndarray[Any, Any], is_mutable: list[bool]) -> Any:
    if value.dtype.hasobject:
        return value.dtype, value.shape, tuple(_key_of(x, is_mutable) for x in value.ravel().tolist())
    return value.dtype, value.shape, value.tobytes()


def _key_of_items(value: dict[Any, Any], is_mutable: list[bool]) -> Any:
    """In order, since whoever gets the dictionary can see that too."""
    return tuple((_key_of(k, is_mutable), _key_of(v, is_mutable)) for k, v in value.items())


def _compares_by_field(cls: Any) -> bool:
    """Whether a class is a dataclass whose `==` was generated: it compares `1` and `True`, which differ here."""
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _key_of_sequence(value: Any, is_mutable: list[bool]) -> Any:
    return tuple(_key_of(x, is_mutable) for x in value)


def _key_of_deque(value: Any, is_mutable: list[bool]) -> Any:
    return value.maxlen, _key_of_sequence(value, is_mutable)


def _key_of_default(value: Any, is_mutable: list[bool]) -> Any:
    return _key_of(value.default_factory, is_mutable), _key_of_items(value, is_mutable)


_MUTABLE: dict[type, Callable[[Any, list[bool]], Any]] = {  # subclasses before their bases
    list: _key_of_sequence,
    collections.defaultdict: _key_of_default,
    dict: _key_of_items,
    set: lambda value, is_mutable: frozenset(_key_of(x, is_mutable) for x in value),
    bytearray: lambda value, _: bytes(value),
    collections.deque: _key_of_deque,
    np.ndarray: _key_of_numpy_array,
}


def _can_be_mutated(cls: Any) -> bool:
    """Whether a class is known for instances that change, hashable or not."""
    return issubclass(cls, tuple(_MUTABLE)) or (_compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def _copy(original: Any) -> Any:
    """A copy of whatever in a value can be mutated; the rest is shared."""
    value: Any = original
    cls: Any = type(value)
    if cls in _IMMUTABLE:
        return value
    if cls is list or cls is set:
        return cls(_copy(x) for x in value)
    if cls is tuple:
        return tuple([_copy(x) for x in value])
    if cls is slice:
        return slice(_copy(value.start), _copy(value.stop), _copy(value.step))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return cls(*[_copy(x) for x in value])
    if cls is dict or cls is collections.OrderedDict:
        return cls((k, _copy(v)) for k, v in value.items())
    if cls is collections.defaultdict:
        return cls(value.default_factory, {k: _copy(v) for k, v in value.items()})
    if cls is collections.deque:
        return cls((_copy(x) for x in value), value.maxlen)
    if cls is bytearray or cls is np.ndarray:
        return value.copy()
    if cls is functools.partial:
        return functools.partial(_copy(value.func), *_copy(value.args), **_copy(value.keywords))
    if not _can_be_mutated(cls) and _is_hashable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:  # noqa: BLE001 -- whatever a user's __deepcopy__ raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None
