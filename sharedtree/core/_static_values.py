"""Static values: all that is not traced. They are part of the structure, and are compared by type and by value.

    Static([1, "a"])     key   (list, ((int, 1), (str, "a")))     holds a copy; two are equal if their keys are

`1`, `True` and `1.0` differ, `0.0` and `-0.0` differ, `nan` equals itself, arrays compare by dtype, shape and bytes.
A value that can be mutated is copied when its `Static` is made, so a later mutation shows up as a difference. It is
copied again for each trace that receives it, so no trace can change the value of another one.

    kind of value                               compared by        in a copy
    number, text, function, device, lock        `==`               the same object
    container, dataclass with generated `==`    its parts          a new one, if it is mutable or a part is new
    class with `==` and a hash                  its `==`           the same object
    class with `==` and no hash                 its `==`           a new one if that is equal, else the same

A key is a nested tuple, which Python hashes and compares. For this Python enters each part once per *path* to it. A
tuple that holds one tuple twice, and so on 60 levels deep, has 2^60 paths. So a value of more than 200 parts, counted
by paths, gets a key of another kind, in which a *row* stands for each part. Equal rows are one object (hash consing,
Ershov 1958), made once for each object in the value and compared by `is`. The value alone decides which of the two
kinds of key it gets, so equal values have equal keys.

A walk takes many static values, and a *memo* (`StaticMemo`) has its results so far: an object that is part of several
values is read and copied once. A *settled* value never changes.

Copies are made part by part and never by `copy.deepcopy`: a deep copy of a function, a lock or a device is another
object, or an error. One object in a value is one object in its copy, so the time for a copy grows with the number of
objects, not with the number of paths to them.
"""

import collections
import contextlib
import copy
import enum
import functools
import importlib
import operator
import struct
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._by_identity import IdentityDict, IdentitySet, Interned, WeakIdentityDict
from ._class_attributes import dataclass_fields
from ._node_types import compares_by_parts, is_namedtuple, parts_of_frozen
from ._printing import shown


class Static:
    """A static value with the key by which it is compared. It holds a copy, which no change outside can reach.

    Two are equal if their values have the same type and content.

    Args:
        value: Anything with an `==`; it need not be hashable.
        memo: Results shared by the `Static`s of one walk.
        is_exact: True keeps the caller's own object instead of a copy, for a tree that is only taken apart to be put
            together again. The key is still that of the content at this moment.

    Attributes:
        exact_objects: With `is_exact`, the objects in the value for which an equal object is no substitute
            (`irreplaceable_objects`), each in an `IdentityKey`. Else empty.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.

    Cost: one walk over the containers in `value`, and a copy of the mutable ones.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_may_have_irreplaceable_objects", "_value", "exact_objects")

    def __init__(self, value: Any, memo: "StaticMemo | None" = None, *, is_exact: bool = False) -> None:
        """Makes the key of the value. Without `is_exact`, copies what is mutable and makes the key of the copy."""
        self._key, self._is_mutable, self._may_have_irreplaceable_objects = key_of(value, memo)
        self._value = value
        self.exact_objects: tuple[IdentityKey, ...] = ()
        if is_exact and self._may_have_irreplaceable_objects:
            exact_objects = irreplaceable_objects(value)
            self.exact_objects = tuple([IdentityKey(obj) for obj in exact_objects])
            # The walk compares these classes with those in the key of the tree, to notice an assigned `__class__`. For
            # other objects, making the key has recorded the class where that is needed.
            if memo is not None:
                for obj in exact_objects:
                    note_class(memo, obj, type(obj))
        elif self._is_mutable and not is_exact:
            memo = new_static_memo() if memo is None else memo
            self._value = copy_of(value, memo.copies)
            # Another thread may have changed the value after its key was read and before it was copied. Only the copy
            # stays what it is, so the key must be the one of the copy.
            self._key, _, _ = key_of(self._value, memo)
        self._hash = hash(self._key)

    def thaw(self) -> Any:
        """Returns the value for a new tree: a new copy if it `is_copied`, else the stored object itself."""
        return self.copied_value(IdentityDict()) if self.is_copied else self._value

    def copied_value(self, copies: IdentityDict[Any]) -> Any:
        """Returns the value with a copy of everything mutable in it, owned by the caller. See `copy_of`."""
        return copy_of(self._value, copies) if self._is_mutable else self._value

    def with_copy(self, copies: IdentityDict[Any]) -> "Static":
        """Returns an equal `Static` that holds the result of `copied_value(copies)`."""
        twin = object.__new__(Static)
        twin._key, twin._hash = self._key, self._hash
        twin._is_mutable, twin._may_have_irreplaceable_objects = self._is_mutable, self._may_have_irreplaceable_objects
        twin._value, twin.exact_objects = self.copied_value(copies), self.exact_objects
        return twin

    @property
    def has_irreplaceable_objects(self) -> bool:
        """True if the value is or holds an object for which an equal one is no substitute, taken exactly or not.

        See `irreplaceable_objects`.
        """
        return self._may_have_irreplaceable_objects and bool(irreplaceable_objects(self._value))

    @property
    def is_copied(self) -> bool:
        """True if `thaw` makes a new copy each time."""
        return self._is_mutable and not self.exact_objects

    @property
    def is_mutable(self) -> bool:
        """True if the value, or anything in it, can be mutated in practice. See `key_of`."""
        return self._is_mutable

    @property
    def is_settled(self) -> bool:
        """True if the object keeps its value for ever, so that `is` is enough to recognise it."""
        return not self._is_mutable and is_settled_value(self._value)

    def peek(self) -> Any:
        """Returns the stored object itself. It must neither be changed nor reach a user."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Static({shown(self._value)})"

    def __reduce__(self) -> Any:
        return Static, (with_names(self._value),)


def with_originals(value: Any, originals: IdentityDict[Any]) -> Any:
    """Returns a static value with its original in place of each copy in it.

    A copy that was changed since it was made stays.

    Args:
        value: A static value. Its containers are searched for copies. One that holds a replaced copy is made anew.
        originals: Copy → original.
    """
    replacements: IdentityDict[Any] = IdentityDict()  # part → its replacement, so that shared parts stay shared

    def replaced(part: Any) -> Any:
        """Returns the replacement of one part, computed once per object."""
        if part in replacements:
            return replacements[part]
        original = originals.get(part, part)
        # A copy is compared with its original; anything else is searched for copies.
        if original is not part:
            replacement = original if Static(original) == Static(part) else part
        else:
            replacement = with_new_parts(part, replaced)
        replacements[part] = replacement
        return replacement

    return replaced(value)


def distinguishing_text(value: Any, counterpart: Any) -> str:
    """Prints a value for an error that names two different ones. If both print alike, prints the first differing part.

    Args:
        value: The value to print.
        counterpart: The value from which it differs.
    """
    # While both texts are the same, go down to the first part that differs.
    while shown(value) == shown(counterpart):
        if isinstance(value, dict):
            value, counterpart = tuple(value.items()), tuple(counterpart.items())
        if not isinstance(value, (tuple, list)) or type(counterpart) is not type(value):
            break
        if len(value) != len(counterpart):
            return f"{shown(value)}, {len(value)} of them"
        pairs = zip(value, counterpart, strict=True)
        differing = [(part, opposite) for part, opposite in pairs if Static(part) != Static(opposite)]
        if not differing:
            break
        value, counterpart = differing[0]
    return shown(value)


# --- keys -------------------------------------------------------------------------------------------------------------


def key_of(value: Any, memo: "StaticMemo | None" = None) -> tuple[Any, bool, bool]:
    """Makes the key of a value.

    Args:
        value: Anything with an `==`.
        memo: Results of the same walk. This call uses and extends them.

    Returns:
        (key, is_mutable, may_have_objects). `is_mutable` is True if anything in the value can be mutated in practice
        (nobody mutates a `functools.partial`). `may_have_irreplaceable_objects` is False if `irreplaceable_objects` is certain to
        find nothing in it.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    # Nearly all values are small, and a nested key is cheaper, so it is tried first.
    key_maker = _KeyMaker(memo, is_nested=True)
    try:
        return key_maker.key_of(value), key_maker.is_mutable, key_maker.may_have_irreplaceable_objects
    except _TooManyPartsError:
        key_maker = _KeyMaker(new_static_memo() if memo is None else memo, is_nested=False)
        return key_maker.key_of(value), key_maker.is_mutable, key_maker.may_have_irreplaceable_objects


_MAX_NESTED = 200
"""The largest number of parts, counted by paths, in a value that gets a nested key."""


class _TooManyPartsError(Exception):
    """A value has more than `_MAX_NESTED` parts."""


class _KeyMaker:
    """Makes the key of one value, nested or of rows.

    Args:
        memo: Results of the same walk. Keys of rows need it.
        is_nested: True for a nested key, False for one of rows.

    Attributes:
        is_mutable: True once a part can be mutated in practice.
        may_have_irreplaceable_objects: True once `irreplaceable_objects` may list a part.
    """

    __slots__ = ("_is_nested", "_memo", "_room", "is_mutable", "may_have_irreplaceable_objects")

    def __init__(self, memo: "StaticMemo | None", is_nested: bool) -> None:
        self.is_mutable = False
        self.may_have_irreplaceable_objects = False
        self._memo = memo
        self._is_nested = is_nested
        # The number of parts that may still come before a nested key is given up. For a key of rows there is no limit,
        # but parts are counted all the same, below zero: the difference of two readings is the number between them.
        self._room = _MAX_NESTED

    def key_of(self, value: Any) -> Any:
        """Makes the key of the value, or of one part of it.

        Raises:
            _TooManyPartsError: If the key was to be nested and has too many parts.
        """
        if type(value) in BY_VALUE:
            return type(value), value
        entry = None if self._memo is None else self._memo.rows.get(id(value))  # alive in the entry
        if self._is_nested:
            # An earlier value of this walk held the same object, and it has too many parts for a nested key.
            if entry is not None and entry.num_parts > _MAX_NESTED:
                raise _TooManyPartsError
            return content_of(value, self)
        # The parts of the object count at each path to it. `_new_entry` counts them at the first one.
        if entry is None:
            entry = self._new_entry(value)
        else:
            self._room -= entry.num_parts
        self.is_mutable |= entry.is_mutable
        self.may_have_irreplaceable_objects |= entry.may_have_irreplaceable_objects
        return entry.row

    def keys_of(self, parts: Collection[Any]) -> tuple[Any, ...]:
        """Makes the keys of the parts of a container, and counts the parts.

        Raises:
            _TooManyPartsError: If the key was to be nested and has too many parts.
        """
        self._room -= len(parts)
        if self._is_nested and self._room < 0:
            raise _TooManyPartsError
        return tuple([self.key_of(part) for part in parts])

    def note_class(self, value: Any, cls: type) -> None:
        """Records the class that an object had when it got into the key. Does nothing without a memo."""
        if self._memo is not None:
            note_class(self._memo, value, cls)

    def _new_entry(self, value: Any) -> "_RowEntry":
        """Makes the row of an object and enters it in the memo."""
        assert self._memo is not None
        was_mutable, had_objects, room_before = self.is_mutable, self.may_have_irreplaceable_objects, self._room
        # `content_of` sets the flags for each part that it meets. They are reset here, so that they then speak of this
        # object alone.
        self.is_mutable = self.may_have_irreplaceable_objects = False
        row = _Row(content_of(value, self))
        row = _rows.intern(hash(row), row)
        # `content_of` has subtracted one from the room for each part. More than the limit need not be known exactly.
        num_parts = min(room_before - self._room, _MAX_NESTED + 1)
        entry = _RowEntry(value, row, self.is_mutable, self.may_have_irreplaceable_objects, num_parts)
        self._memo.rows[id(value)] = entry  # alive in the entry
        # Now the flags speak again of all that was read before, and of this object.
        self.is_mutable |= was_mutable
        self.may_have_irreplaceable_objects |= had_objects
        return entry


class _Row:
    """One part of a large value, by its content. `_rows` makes equal rows one object.

    No lock is held while contents are compared, since that may run a user's `==`.
    """

    __slots__ = ("__weakref__", "_hash", "content")

    def __init__(self, content: Any) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Does nothing: a row is complete when it is made. `Interned` asks for this method."""

    def is_like(self, row: "_Row") -> bool:
        """Returns True if both rows have the same content."""
        return self.content == row.content


_rows: Interned[_Row] = Interned()


class _RowEntry(NamedTuple):
    """The row of one object, with the facts collected while it was made.

    Attributes:
        value: The object, kept alive here.
        row: Its row.
        is_mutable: True if anything in it can be mutated.
        may_have_irreplaceable_objects: See `_KeyMaker`.
        num_parts: The number of its parts, counted by paths, and at most `_MAX_NESTED + 1`.
    """

    value: Any
    row: _Row
    is_mutable: bool
    may_have_irreplaceable_objects: bool
    num_parts: int


class StaticMemo(NamedTuple):
    """Results shared by the `Static`s of one walk, many of which may hold the same large object.

    Attributes:
        rows: id → the object, kept alive by the entry, and its row.
        copies: Object → its copy. See `copy_of`.
        classes: id → the object's class when it was read. Only for objects compared by identity or by their own `==`,
            and for exact objects. Their keys (`IdentityKey`, `_EqualityKey`) keep them alive.
    """

    rows: dict[int, _RowEntry]
    copies: IdentityDict[Any]
    classes: dict[int, type]


def new_static_memo() -> StaticMemo:
    """Makes an empty memo for one walk. No object may change while a memo is in use."""
    return StaticMemo({}, IdentityDict(), {})


def note_class(memo: StaticMemo, value: Any, cls: type) -> None:
    """Records the class that an object had when it got into a key. Detects a change of class during the walk."""
    if memo.classes.setdefault(id(value), cls) is not cls:  # alive in the key
        memo.classes[id(value)] = _SeveralClasses  # as above


class _SeveralClasses:
    """Entered in place of a class if an object's class changed during the walk. No object is of this class."""


# --- pickling ---------------------------------------------------------------------------------------------------------


def with_names(value: Any) -> Any:
    """Replaces the functions of libraries in a value by their names, for a pickle.

    Only tuples are entered. Plain functions, classes and everything in `__main__` are left to the pickler, since
    `cloudpickle` writes them by value.
    """
    if type(value) is tuple:
        return tuple([with_names(part) for part in value])
    if not callable(value) or isinstance(value, (type, types.FunctionType)):
        return value
    module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    try:
        resolved = operator.attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return value
    return _ByName(module, name) if resolved is value and module != "__main__" else value


class _ByName:
    """A function in a pickle, written as its name. Pickle cannot do that for `jax.nn.relu`, an object of a class."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __reduce__(self) -> Any:
        return _named, (self.module, self.name)


def _named(module: str, name: str) -> Any:
    """Looks a name up, as pickles from `_ByName` ask for when they are loaded."""
    return operator.attrgetter(name)(importlib.import_module(module))


# --- the kinds of static value ----------------------------------------------------------------------------------------


class _ArrayContent(tuple[Any, ...]):
    """The dtype, shape and bytes of an array: one part, compared by its own `==` and not entered."""

    __slots__ = ()


BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), _ArrayContent})
"""The types for which type and `==` together say all: an instance is its own key. Floats are not among them."""

_IMMUTABLE = BY_VALUE | {float, complex, type, range, types.FunctionType, types.BuiltinFunctionType, types.MethodType}

_FIXED_CLASSES = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)
"""Classes whose instances, and those of all subclasses, never change."""

_NUMBERS_AND_TEXTS = (float, complex, int, str, bytes)


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or cannot be hashed or copied.

    Attributes:
        value: The object at fault.
        reason: The second half of the message.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


# --- the content by which a value is compared -------------------------------------------------------------------------


def content_of(value: Any, key_maker: _KeyMaker) -> Any:
    """Returns the content by which a value is compared: its class, and everything else that tells it from others.

    Args:
        value: Any object of a class outside `BY_VALUE`.
        key_maker: Makes the keys of the parts. Its flag `is_mutable` is set if the value or a part of it is mutable,
            and `may_have_irreplaceable_objects` if `irreplaceable_objects` may list one.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    cls: Any = type(value)
    # By far the most frequent class, and looking up its row in `_CONTAINERS` would take too long.
    if cls is tuple:
        return cls, key_maker.keys_of(value)
    # The class has no `==` of its own, so a value is equal only to itself. A partial has the `==` of `object`, too, but
    # is compared by its parts.
    if cls.__eq__ is object.__eq__ and cls is not functools.partial:
        if cls.__hash__ is not object.__hash__:
            _is_hashable(value)  # for the error if its `__hash__` raises
        key_maker.note_class(value, cls)
        return cls, IdentityKey(value)
    if cls in _NUMBERS_AND_TEXTS:
        return cls, _bits_of(value)
    base = _container_base(cls)
    if base is not None:
        return _content_of_container(value, base, key_maker)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    key_maker.may_have_irreplaceable_objects = True
    # The `==` of a tracer or a reference makes an array, or raises.
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, IdentityKey(value)
    if isinstance(value, jax.Array):
        return _content_of_jax_array(value)
    if _compares_by_field(cls):
        return _content_of_dataclass(value, key_maker)
    if compares_by_parts(cls):
        return cls, key_maker.keys_of(_keys_and_values(_attributes_of(value)))
    # Any other class has an `==` of its own, which decides.
    _require_equality(value)
    # A subclass of `float` inherits an `==` that takes 0.0 for -0.0.
    bits = _bits_of(value) if isinstance(value, _NUMBERS_AND_TEXTS) else None
    if _is_hashable(value):
        key_maker.note_class(value, cls)
        return cls, bits, _equality_key(value)
    key_maker.is_mutable = True
    return cls, bits, _equality_key_of_copy(value)


def _content_of_container(value: Any, base: type, key_maker: _KeyMaker) -> Any:
    """Returns the content of a container: its class and parts and, if a subclass has its own `==`, a key for that.

    Args:
        value: The container.
        base: The row of `_CONTAINERS` that it belongs to: its class or a base.
        key_maker: As for `content_of`.
    """
    cls, container = type(value), _CONTAINERS[base]
    # `irreplaceable_objects` may list it: a mutable one, one of a subclass that is more than its items, or a partial.
    if container.is_mutable or (cls is not base and not _is_only_its_items(cls)) or cls is functools.partial:
        key_maker.may_have_irreplaceable_objects = True
    if container.is_mutable:
        key_maker.is_mutable = True
    parts = key_maker.keys_of(container.parts(value))
    content = parts if container.is_ordered else frozenset(parts)
    # The `==` of an array gives one answer per element, so it cannot be asked.
    if cls is base or cls.__eq__ is base.__eq__ or base is np.ndarray:
        return cls, content
    # The `==` of the subclass decides, too: it may compare attributes besides the items.
    _require_equality(value)
    return cls, content, _equality_key_of_copy(value)


def _content_of_dataclass(value: Any, key_maker: _KeyMaker) -> Any:
    """Returns the content of a dataclass with a generated `==`: the fields that this compares, and their keys."""
    cls: Any = type(value)
    # A field that was never set is left out, and so is one declared with `compare=False`.
    compared = [field.name for field in dataclass_fields(cls) if field.compare and hasattr(value, field.name)]
    was_mutable = key_maker.is_mutable
    parts = key_maker.keys_of([getattr(value, name) for name in compared])
    if _can_be_mutated(cls):
        key_maker.is_mutable = True
    elif _defines_hash(cls):
        # By a hash written by hand, a class promises that its instances do not change. So a list in one does not count
        # as mutable.
        key_maker.is_mutable = was_mutable
    return cls, tuple(compared), parts


def _content_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


def _bits_of(value: Any) -> Any:
    """Returns a number or text, of one of `_NUMBERS_AND_TEXTS` or a subclass, in a form that compares strictly.

    A float or complex number becomes bytes, so that 0.0 and -0.0 differ and `nan` equals itself. Any other one becomes
    an instance of the built-in class.
    """
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    base: Any = next(base for base in (int, str, bytes) if isinstance(value, base))
    instance: Any = value
    # The method of the base is called, since a subclass may override the operator.
    return base.__pos__(instance) if base is int else base.__getitem__(instance, slice(None))


class IdentityKey:
    """A key that is equal only to keys of the same object. It keeps the object alive."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is IdentityKey and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _EqualityKey:
    """A key that is equal to keys of the same object, and of equal objects of the same type.

    The hash is taken once. So if an object changes although it can be hashed, its key still has the hash of the first
    time, as in `jax.jit`.
    """

    __slots__ = ("__weakref__", "_hash", "obj")

    def __init__(self, obj: Any, hash_value: int) -> None:
        self.obj = obj
        self._hash = hash_value

    def __eq__(self, other: object) -> bool:
        if type(other) is not _EqualityKey or type(self.obj) is not type(other.obj):
            return False
        return self.obj is other.obj or bool(self.obj == other.obj)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Does nothing: a key is complete when it is made. `Interned` asks for this method."""

    def is_like(self, key: "_EqualityKey") -> bool:
        """Returns True if both keys are equal."""
        return self == key


_equality_keys: Interned[_EqualityKey] = Interned()

_first_keys: WeakIdentityDict["weakref.ref[_EqualityKey]"] = WeakIdentityDict()
"""Object with an `==` and a hash of its own → its first key. The entry is dead once no structure has this key any more.

Equal keys are interned as one object. So the key of an object may be that of an equal object in an earlier structure.
"""


def _equality_key(value: Any) -> _EqualityKey:
    """Returns the key of a hashable object: its first one, if still alive."""
    reference = _first_keys.get(value)
    first_key = None if reference is None else reference()
    if first_key is not None:
        return first_key
    hash_value = hash(value)
    key = _equality_keys.intern(hash_value, _EqualityKey(value, hash_value))
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        _first_keys[value] = weakref.ref(key)
    return key


def _equality_key_of_copy(value: Any) -> _EqualityKey:
    """Makes the key of an object without a stable hash, from a copy of it and the hash of its class."""
    return _EqualityKey(copy_of(value, IdentityDict()), hash(type(value)))


def _require_equality(value: Any) -> None:
    """Raises `Incomparable` unless `value == value` returns a bool."""
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


def _is_equal(value: Any, counterpart: Any) -> bool:
    """Compares two objects by `==`, and turns any exception into `Incomparable`."""
    try:
        return bool(value == counterpart)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__eq__` raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None


def _is_hashable(value: Any) -> bool:
    """Returns False if hashing raises `TypeError`, and turns any other exception into `Incomparable`."""
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_of(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies everything mutable in a value, and shares the rest. See the table at the top of this file.

    Args:
        value: Any static value.
        copies: The copies made so far. This call uses and extends them, so one object has one copy.

    Returns:
        The copy; the value itself if nothing in it can be mutated.

    Raises:
        Incomparable: If an object refuses to be copied.
    """
    cls: Any = type(value)
    # JAX's arrays are immutable. Under a trace a `jax.Ref` may be an instance of `jax.Array`, too, but can be written.
    if cls in _IMMUTABLE or (isinstance(value, jax.Array) and not isinstance(value, jax.Ref)):
        return value
    if value in copies:
        return copies[value]
    base = _container_base(cls)
    if base is not None:
        copied = _CONTAINERS[base].copy(value, functools.partial(copy_of, copies=copies))
        # An instance of a subclass may have attributes besides its items.
        if cls is not base and copied is not value:
            _copy_attributes(value, copied, copies)
    elif _compares_by_field(cls):
        # By a hash of its own, a class promises that its instances do not change.
        copied = value if _defines_hash(cls) else _copy_dataclass(value, copies)
    elif compares_by_parts(cls) or _is_hashable(value):
        copied = value
    else:
        copied = _copy_unhashable(value, copies)
    copies[value] = copied
    return copied


def _copy_dataclass(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies a dataclass with a generated `==`. Returns the object itself if it is frozen and holds nothing mutable."""
    if _can_be_mutated(type(value)):
        return _copy_by_parts(value, copies)
    # It is frozen. To ask for its hash would be another test of its parts, but hashing walks all paths below it.
    names = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    new_parts = {name: copy_of(getattr(value, name), copies) for name in names}
    if all(getattr(value, name) is new_parts[name] for name in names):
        return value
    clone = copy.copy(value)
    for name, part in new_parts.items():
        object.__setattr__(clone, name, part)
    return clone


def _copy_unhashable(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies an object with an `==` of its own and no hash. Returns the object itself if the copy is not equal."""
    # The number of copies before those of this object and its parts.
    size_before = len(copies)
    if hasattr(value, "__dict__") or _slots_of(type(value)):
        clone = _copy_by_parts(value, copies)
    else:
        clone = _run_copier(copy.deepcopy, value)
    if clone is value or _is_equal(value, clone):
        return clone
    # The clone is given up. Copies of its parts may refer to it, so they are forgotten, too.
    copies.forget_after(size_before)
    return value


def _copy_by_parts(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies an object by `copy.copy`, and then its attributes part by part.

    Returns the object itself if `copy.copy` gives that, or an object of another class.
    """
    clone = _run_copier(copy.copy, value)
    if clone is value or type(clone) is not type(value):
        return value
    # Entered before its parts are copied, for they may lead back to the object.
    copies[value] = clone
    _copy_attributes(value, clone, copies)
    return clone


def _run_copier(copier: Callable[[Any], Any], value: Any) -> Any:
    """Calls `copy.copy` or `copy.deepcopy`, and turns any exception into `Incomparable`."""
    try:
        # In a trace, copies of the arrays in it would be tracers.
        with jax.ensure_compile_time_eval():
            return copier(value)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__copy__` raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_attributes(value: Any, clone: Any, copies: IdentityDict[Any]) -> None:
    """Copies the attributes and slots of an object into its shallow copy.

    Args:
        value: The object.
        clone: The shallow copy.
        copies: The copies made so far. This call uses and extends them.
    """
    # A list, because another thread may add an attribute meanwhile.
    for name, part in list(getattr(value, "__dict__", {}).items()):
        # If the class's `__copy__` has put another object here, that belongs to the clone alone already.
        if vars(clone).get(name, part) is part:
            vars(clone)[name] = copy_of(part, copies)
    for slot in _slots_of(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:  # never set
            continue
        with contextlib.suppress(AttributeError, TypeError):  # it is read-only, as those of classes in C are
            slot.__set__(clone, copy_of(part, copies))


def _slots_of(cls: type) -> list[Any]:
    """Returns the descriptors of the slots of a class and its bases."""
    descriptors = [entry for base in cls.__mro__ for entry in vars(base).values()]
    return [entry for entry in descriptors if type(entry) is types.MemberDescriptorType]


def with_new_parts(value: Any, new_part: "_CopyPart") -> Any:
    """Returns a container of the same class with new parts. Returns the value itself if no part of it is new.

    Args:
        value: Any static value. One that is no container is returned as it is.
        new_part: part → the object to put in its place, which may be the part itself. It is called more than once for a
            part.
    """
    cls = type(value)
    container = _CONTAINERS.get(tuple if _is_only_its_items(cls) else cls)
    if container is None or all(new_part(part) is part for part in container.parts(value)):
        return value
    return container.copy(value, new_part)


# --- stability --------------------------------------------------------------------------------------------------------


class SettledAnswer:
    """The answer of `is_settled_value` for one value, preliminary until its parts have been visited.

    Attributes:
        is_settled: True if the value stays the same for ever, as far as it is known. False once the value itself, or a
            visited part, turned out to be able to change.
        parts: The parts that are still to be asked. Empty once they have answered.
    """

    __slots__ = ("is_settled", "parts")

    def __init__(self, value: Any) -> None:
        parts = _parts_if_fixed(value)
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


def is_settled_value(value: Any, stabilities: IdentityDict[SettledAnswer] | None = None) -> bool:
    """Returns True if the object keeps its value for ever.

    Only the parts of a `functools.partial` or a frozen dataclass decide: it could itself be changed, but nobody does
    that. A frozen dataclass with a hash written by hand promises to stay the same, so its fields are not asked. An
    object that is compared by identity keeps its value, which is the object itself, whatever changes in it. Values of
    classes about which nothing is known count as able to change.

    Args:
        value: Any static value.
        stabilities: The answers so far. This call uses and extends them.
    """
    stabilities = IdentityDict() if stabilities is None else stabilities
    stack = [value]  # each value comes off twice: on the way down, and again after its parts
    while stack:
        stability = stabilities.get(stack[-1])
        # On the way down, the parts are put on top of the value.
        if stability is None:
            stability = stabilities[stack[-1]] = SettledAnswer(stack[-1])
            stack.extend(stability.parts)
            continue
        # On the way up, all parts have an answer. A value that contains itself meets its own preliminary one, which
        # is True, so its other parts decide.
        stack.pop()
        stability.is_settled = stability.is_settled and all(stabilities[part].is_settled for part in stability.parts)
        stability.parts = ()
    return stabilities[value].is_settled


def _parts_if_fixed(value: Any) -> Iterable[Any] | None:
    """Returns the parts that decide whether a value can change.

    Returns:
        The parts, if the value can change through them alone. `()` if nothing in it can change. None if the value
        itself can be changed, or if nothing is known about its class.
    """
    cls: type = type(value)
    container = _CONTAINERS.get(tuple if is_namedtuple(cls) else cls)
    if container is not None:
        return None if container.is_mutable else container.parts(value)
    # The key of such a value is its content or its address, and stays the same for ever. An object compared by identity
    # may change inside, but its key does not. So there are no parts to ask.
    if cls in _IMMUTABLE or has_settled_instances(cls) or issubclass(cls, np.generic):
        return ()
    # A frozen dataclass changes only through its fields.
    if _compares_by_field(cls) and not _can_be_mutated(cls):
        if _defines_hash(cls):
            return ()
        return [getattr(value, field.name) for field in dataclass_fields(cls) if hasattr(value, field.name)]
    if compares_by_parts(cls):
        return _attributes_of(value).values()
    return parts_of_frozen(value)


def has_settled_instances(cls: type) -> bool:
    """Returns True if the key of an instance can never change, so that its address may stand for it.

    This holds for classes, for objects that are compared by identity, and for dtypes, shardings and meshes.
    """
    # A partial has the `==` of `object`, but is compared by its parts.
    if cls is functools.partial:
        return False
    return cls is type or cls.__eq__ is object.__eq__ or issubclass(cls, _FIXED_CLASSES)


# --- objects with identity --------------------------------------------------------------------------------------------

_INTERCHANGEABLE = BY_VALUE | {float, complex, range, types.MethodType, types.BuiltinFunctionType}

_MANY_PARTS = 200
"""The number of visits from which on entered parts are remembered. Before, entering one again is cheaper."""


def irreplaceable_objects(value: Any) -> list[Any]:
    """Lists the objects in a static value, itself included, for which an equal object is no substitute.

    Lists and configs are such objects: a user can tell by `is` whether a model still has the same one, and an `==` may
    compare only some attributes. Numbers, texts and tuples are not, since they are nothing but their value. Functions
    and devices are not either: two are equal only if they are the same object.
    The search does not go on below an object that it lists.

    Returns:
        The objects in the order of the walk, without repetitions.
    """
    objects = IdentitySet()
    entered: IdentitySet | None = None
    num_visits = 0
    stack = [value]
    while stack:
        part = stack.pop()
        cls: Any = type(part)
        if cls in _INTERCHANGEABLE:
            continue
        # In a large value, enter each object only once.
        num_visits += 1
        if num_visits == _MANY_PARTS:
            entered = IdentitySet()
        if entered is not None and not entered.add(part):
            continue
        if cls is tuple:
            stack.extend(reversed(part))
            continue
        # Equal only to itself, so no equal object can take its place. A partial has the `==` of `object`, too, but is
        # compared by its parts.
        has_no_content = cls.__eq__ is object.__eq__ and cls is not functools.partial
        if has_no_content or issubclass(cls, (np.generic, enum.Enum, *_FIXED_CLASSES)):
            continue
        # A container that cannot change is entered. So is what a library declares immutable. All else is listed.
        if cls in (slice, frozenset) or _is_only_its_items(cls):
            parts: Iterable[Any] | None = _CONTAINERS[cls if cls in _CONTAINERS else tuple].parts(part)
        else:
            parts = parts_of_frozen(part)
        if parts is None:
            objects.add(part)
        else:
            stack.extend(reversed(list(parts)))
    return list(objects)


# --- properties of classes --------------------------------------------------------------------------------------------


def _compares_by_field(cls: Any) -> bool:
    """Returns True for a dataclass with a generated `==`, which is not called: for it, `1` equals `True`."""
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    # `dataclass(eq=True)` keeps an `__eq__` that the class defines. A generated one was compiled from a string.
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _defines_hash(cls: Any) -> bool:
    """Returns True for a class with a hash written by hand: a promise of instances that do not change."""
    code = getattr(cls.__dict__.get("__hash__"), "__code__", None)
    return code is not None and code.co_filename != "<string>"


def _can_be_mutated(cls: Any) -> bool:
    """Returns True for a mutable container, and for a dataclass with a generated `==` that is not frozen."""
    return issubclass(cls, _MUTABLE) or (_compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def _is_only_its_items(cls: Any) -> bool:
    """Returns True for a namedtuple that has no attributes besides its items, and no `==` of its own."""
    return is_namedtuple(cls) and cls.__eq__ is tuple.__eq__ and cls.__dictoffset__ == 0


def _container_base(cls: type) -> type | None:
    """Returns the class of `_CONTAINERS` to which a class belongs, itself or a base; None if it is no container.

    Subclasses of `functools.partial` are no containers.
    """
    if cls in _CONTAINERS:
        return cls
    if not issubclass(cls, _WITH_SUBCLASSES):
        return None
    return next(base for base in _WITH_SUBCLASSES if issubclass(cls, base))


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an instance, without calling its class."""
    return object.__getattribute__(value, "__dict__")


# --- containers: their parts and copies -------------------------------------------------------------------------------
# The functions call the methods of the built-in class and never `value.append` or the like, which a subclass may have
# overridden.

_CopyPart = Callable[[Any], Any]


class _Container(NamedTuple):
    """One kind of container.

    Attributes:
        is_mutable: True if an instance can be changed.
        parts: instance → the values by which it is compared, beside its class.
        copy: (instance, function for each part) → a container of the same class with the results of the function as
            parts. The instance itself if it is immutable and each part is its own result. Elements of sets, keys of
            dictionaries and bounds of a `range` are not passed to the function.
        is_ordered: True if the order of the parts counts.
    """

    is_mutable: bool
    parts: Callable[[Any], Collection[Any]]
    copy: Callable[[Any, _CopyPart], Any]
    is_ordered: bool = True


def _keys_and_values(mapping: dict[Any, Any]) -> list[Any]:
    """Returns the keys and then the values of a dictionary. Their order counts, because a user can see it."""
    return [*dict.keys(mapping), *dict.values(mapping)]


def _parts_of_ordered_dict(mapping: "collections.OrderedDict[Any, Any]") -> list[Any]:
    """Returns the keys and then the values of an `OrderedDict`. After `move_to_end`, `dict.keys` has a stale order."""
    keys = list(collections.OrderedDict.__iter__(mapping))
    return [*keys, *[dict.__getitem__(mapping, key) for key in keys]]


def _parts_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    """Returns the dtype, shape and bytes of an array as one part; for objects, the elements in place of the bytes."""
    # The view is a plain array: `tobytes` of a masked array would leave out the masked elements.
    array = value.view(np.ndarray)
    if array.dtype.hasobject:
        content: list[Any] = [_ArrayContent((array.dtype, array.shape)), *array.ravel().tolist()]
    else:
        content = [_ArrayContent((array.dtype, array.shape, array.tobytes()))]
    # A subclass has its mask or its unit in attributes.
    return content if type(value) is np.ndarray else [*content, *_keys_and_values(getattr(value, "__dict__", {}))]


def _keep(value: Any, _: _CopyPart) -> Any:
    return value


def _copy_tuple(value: Any, copy_part: _CopyPart) -> Any:
    parts = [copy_part(part) for part in tuple.__iter__(value)]
    is_unchanged = all(part is copied for part, copied in zip(tuple.__iter__(value), parts, strict=True))
    return value if is_unchanged else tuple.__new__(type(value), parts)


def _copy_slice(value: slice, copy_part: _CopyPart) -> slice:
    bounds = value.start, value.stop, value.step
    copied = _copy_tuple(bounds, copy_part)
    return value if copied is bounds else slice(*copied)


def _copy_partial(value: functools.partial[Any], copy_part: _CopyPart) -> functools.partial[Any]:
    func, args = copy_part(value.func), _copy_tuple(value.args, copy_part)
    keywords = {name: copy_part(part) for name, part in value.keywords.items()}
    has_new_keyword = any(part is not keywords[name] for name, part in value.keywords.items())
    if func is value.func and args is value.args and not has_new_keyword:
        return value
    return functools.partial(func, *args, **keywords)


def _copy_list(value: Any, copy_part: _CopyPart) -> Any:
    clone = list.__new__(type(value))
    list.extend(clone, [copy_part(part) for part in list.__iter__(value)])
    return clone


def _copy_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = dict.__new__(type(value))
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_ordered_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.OrderedDict.__new__(type(value))
    for key in collections.OrderedDict.__iter__(value):
        collections.OrderedDict.__setitem__(clone, key, copy_part(dict.__getitem__(value, key)))
    return clone


def _copy_default_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.defaultdict.__new__(type(value))
    collections.defaultdict.__init__(clone, value.default_factory)
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_set(value: Any, _: _CopyPart) -> Any:
    clone = set.__new__(type(value))
    set.update(clone, set.__iter__(value))
    return clone


def _copy_bytearray(value: Any, _: _CopyPart) -> Any:
    clone = bytearray.__new__(type(value))
    bytearray.extend(clone, bytes(value))
    return clone


def _copy_deque(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.deque.__new__(type(value))
    parts = [copy_part(part) for part in collections.deque.__iter__(value)]
    collections.deque.__init__(clone, parts, value.maxlen)
    return clone


def _copy_array(value: Any, copy_part: _CopyPart) -> Any:
    clone = np.ndarray.copy(value)
    if clone.dtype.hasobject:
        elements = clone.view(np.ndarray)
        for index in np.ndindex(elements.shape):
            elements[index] = copy_part(elements[index])
    return clone


def _copy_mapping_proxy(value: Any, copy_part: _CopyPart) -> Any:
    return types.MappingProxyType({key: copy_part(part) for key, part in value.items()})


def _copy_namespace(value: Any, copy_part: _CopyPart) -> Any:
    clone = types.SimpleNamespace.__new__(type(value))
    vars(clone).update({name: copy_part(part) for name, part in vars(value).items()})
    return clone


_CONTAINERS: dict[type, _Container] = {
    tuple: _Container(False, lambda value: list(tuple.__iter__(value)), _copy_tuple),
    # The elements of a set can be hashed, so they are not copied.
    frozenset: _Container(False, lambda value: list(frozenset.__iter__(value)), _keep, is_ordered=False),
    slice: _Container(False, lambda value: (value.start, value.stop, value.step), _copy_slice),
    # By its parts, and not by `==`: `range(0, 3, 2) == range(0, 4, 2)`, but a user can see which of the two it is.
    range: _Container(False, lambda value: (value.start, value.stop, value.step), _keep),
    functools.partial: _Container(
        False, lambda value: [value.func, value.args, *_keys_and_values(value.keywords)], _copy_partial
    ),
    list: _Container(True, lambda value: list(list.__iter__(value)), _copy_list),
    collections.OrderedDict: _Container(True, _parts_of_ordered_dict, _copy_ordered_dict),
    collections.defaultdict: _Container(
        True, lambda value: [value.default_factory, *_keys_and_values(value)], _copy_default_dict
    ),
    dict: _Container(True, _keys_and_values, _copy_dict),
    set: _Container(True, lambda value: list(set.__iter__(value)), _copy_set, is_ordered=False),
    bytearray: _Container(True, lambda value: [bytes(value)], _copy_bytearray),
    collections.deque: _Container(True, lambda value: [value.maxlen, *collections.deque.__iter__(value)], _copy_deque),
    np.ndarray: _Container(True, _parts_of_array, _copy_array),
    # Whoever has the dictionary behind a proxy can change it.
    types.MappingProxyType: _Container(True, lambda value: [*value.keys(), *value.values()], _copy_mapping_proxy),
    types.SimpleNamespace: _Container(True, lambda value: _keys_and_values(vars(value)), _copy_namespace),
}
"""Class of containers → its row. Subclasses come before their bases."""

_WITH_SUBCLASSES = tuple([cls for cls in _CONTAINERS if cls is not functools.partial])
_MUTABLE = tuple([cls for cls, container in _CONTAINERS.items() if container.is_mutable])
