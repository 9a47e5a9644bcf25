"""What a static value is compared by: strictly, by type and by value.

A value becomes a key of nested tuples, which Python hashes and compares: `[1, "a"]` is
`(list, ((int, 1), (str, "a")))`.
Python does that once for each *path*, and a tuple that holds one tuple twice, and so on 60 levels deep, has 2^60 of
them. So in the key of what has more than 200 parts, counted by paths, each part is a row, and equal rows are one
object (hash consing, Ershov 1958), which is made once for each object in the value, and compared by `is`. Which of the
two forms a key has depends on the value alone, so equal values have equal keys.
"""

import collections
import functools
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._class_attributes import dataclass_fields
from ._interned import Interned
from ._static_copies import (
    Incomparable,
    can_be_mutated,
    compares_as_module,
    compares_by_field,
    copy_of,
    has_own_hash,
    is_hashable,
)

BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented)})
"""The types whose instances are alike exactly if they have the same type and are equal."""


class Same:
    """Equal only to the same object, which it keeps alive: tracers and references have no other equality."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.obj is other.obj

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


def _require_equality(value: Any) -> None:
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


class _Row:
    """What a part of a large value is made of. Equal ones are one object, which `_rows` sees to.

    Contents are compared, and with them values of users, when no lock is held.
    """

    __slots__ = ("__weakref__", "_hash", "content")

    def __init__(self, content: Any) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Nothing follows from it."""

    def is_like(self, other: "_Row") -> bool:
        """Whether another one has the same content."""
        return self.content == other.content


_rows: Interned[_Row] = Interned()

_MAX_NESTED = 200  # parts, counted by paths, of what has a nested key


class _TooManyPartsError(Exception):
    """A value has more parts than a nested key is made for."""


class Known(NamedTuple):
    """What the `Static`s that one walk makes know of the objects in them, many of which may hold the same large one.

    Attributes:
        rows: id → the object, kept alive here, and its row.
        copies: see `copy_of`.
        alive: what the copies are of.
        classes: id → the class that a value had when it was read that stays itself in its key, which keeps it alive.
    """

    rows: dict[int, "_Known"]
    copies: dict[int, Any]
    alive: list[Any]
    classes: dict[int, type]


def nothing_known() -> Known:
    """For a new walk, in which no object changes."""
    return Known({}, {}, [], {})


class _Several:
    """Stands for the class of a value that was of more than one while it was read."""


class _Known(NamedTuple):
    """Of one object: itself, its row, what in it can be mutated, see `_Keys`; its parts by paths, few or too many."""

    value: Any
    row: _Row
    is_mutable: frozenset[bool]
    num_parts: int


class _Keys:
    """Makes the key of one value.

    Args:
        known: of the walk; needed if the key is not to be nested.
        is_nested: whether it is.

    Attributes:
        is_mutable: has an entry for each part that can be mutated; False for those that nobody mutates.
    """

    __slots__ = ("_is_nested", "_known", "_left", "is_mutable")

    def __init__(self, known: Known | None, is_nested: bool) -> None:
        self.is_mutable: list[bool] = []
        self._known = known
        self._is_nested = is_nested
        self._left = _MAX_NESTED

    def of(self, value: Any) -> Any:
        """What stands for a part in the key of what holds it."""
        if type(value) in BY_VALUE:
            return type(value), value
        found = None if self._known is None else self._known.rows.get(id(value))  # alive in the entry
        if self._is_nested:
            if found is not None and found.num_parts > _MAX_NESTED:
                raise _TooManyPartsError
            return _content_of(value, self)
        if found is not None:
            self.is_mutable.extend(found.is_mutable)
            self._left -= found.num_parts
            return found.row
        assert self._known is not None
        before, left = len(self.is_mutable), self._left
        content = _content_of(value, self)
        row = _Row(content)
        row = _rows.one_like(hash(row), row)
        num_parts = min(left - self._left, _MAX_NESTED + 1)
        entry = _Known(value, row, frozenset(self.is_mutable[before:]), num_parts)
        self._known.rows[id(value)] = entry  # alive in the entry
        return row

    def note_class(self, value: Any, cls: type) -> None:
        """Notes of which class a value is that stays itself in its key."""
        if self._known is not None and self._known.classes.setdefault(id(value), cls) is not cls:  # alive in the key
            self._known.classes[id(value)] = _Several  # as above

    def of_all(self, values: Collection[Any]) -> tuple[Any, ...]:
        """What stands for several parts."""
        self._left -= len(values)
        if self._is_nested and self._left < 0:
            raise _TooManyPartsError
        return tuple([self.of(value) for value in values])

    def of_items(self, value: dict[Any, Any]) -> Any:
        """In order, since whoever gets the dictionary can see that too."""
        return self.of_all(value.keys()), self.of_all(value.values())


def key_of(value: Any, known: Known | None = None) -> tuple[Any, list[bool]]:
    """The key of a value, and an entry for each part of it that can be mutated; False for what nobody mutates.

    Raises:
        Incomparable: if the value, or something in it, has no usable `==`.
    """
    keys = _Keys(known, is_nested=True)
    try:
        return keys.of(value), keys.is_mutable
    except _TooManyPartsError:
        keys = _Keys(nothing_known() if known is None else known, is_nested=False)
        return keys.of(value), keys.is_mutable


def _content_of(value: Any, keys: _Keys) -> Any:
    cls: Any = type(value)
    if cls in BY_VALUE:
        return cls, value
    if cls is float:
        return cls, struct.pack("d", value)
    if cls is complex:
        return cls, struct.pack("dd", value.real, value.imag)
    if cls is slice:
        return cls, keys.of_all((value.start, value.stop, value.step))
    if isinstance(value, tuple):
        return cls, keys.of_all(value)
    if isinstance(value, frozenset):
        return cls, frozenset(keys.of_all(value))
    if cls is functools.partial:
        return cls, keys.of_all((value.func, value.args)), keys.of_items(value.keywords)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, Same(value)
    if isinstance(value, jax.Array):
        return _key_of_jax_array(value)
    for base, snapshot in _MUTABLE.items():
        if isinstance(value, base):
            keys.is_mutable.append(True)
            return cls, snapshot(value, keys)
    if compares_by_field(cls):
        if can_be_mutated(cls):
            keys.is_mutable.append(True)
        compared = [f.name for f in dataclass_fields(cls) if f.compare and hasattr(value, f.name)]  # or was never set
        before = len(keys.is_mutable)
        parts = keys.of_all([getattr(value, name) for name in compared])
        if has_own_hash(cls) and not can_be_mutated(cls):
            del keys.is_mutable[before:]
        return cls, tuple(compared), parts
    if compares_as_module(cls):
        return cls, keys.of_items(object.__getattribute__(value, "__dict__"))
    _require_equality(value)
    if is_hashable(value):
        keys.note_class(value, cls)
        return cls, _ByEquality(value, is_hashable=True)
    keys.is_mutable.append(True)
    return cls, _ByEquality(copy_of(value, {}), is_hashable=False)


def _key_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


def _key_of_numpy_array(value: np.ndarray[Any, Any], keys: _Keys) -> Any:
    if value.dtype.hasobject:
        return value.dtype, value.shape, keys.of_all(value.ravel().tolist())
    return value.dtype, value.shape, value.tobytes()


_MUTABLE: dict[type, Callable[[Any, _Keys], Any]] = {  # subclasses before their bases
    list: lambda value, keys: keys.of_all(value),
    collections.defaultdict: lambda value, keys: (keys.of(value.default_factory), keys.of_items(value)),
    dict: lambda value, keys: keys.of_items(value),
    set: lambda value, keys: frozenset(keys.of_all(value)),
    bytearray: lambda value, _: bytes(value),
    collections.deque: lambda value, keys: (value.maxlen, keys.of_all(value)),
    np.ndarray: _key_of_numpy_array,
}
