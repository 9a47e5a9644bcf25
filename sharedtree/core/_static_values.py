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

Words:

- the *content* of an object: its class, and everything else that tells it from objects of the same class;
- the *parts* of an object: the objects directly in it that belong to its content, such as items and fields;
- an *irreplaceable* object: one for which an equal object is no substitute, such as a list or a config;
- an *exact* walk: one that keeps the caller's own irreplaceable objects, and makes no copies of them;
- a *settled* value: one whose key never changes, so that the address of the object can stand for it;
- a *memo* (`StaticMemo`): the results of one walk so far. A walk reads many static values. If one object is part of
  several of them, it is read and copied once.

Copies are made part by part. A `copy.deepcopy` of the whole value would copy functions, locks and devices, too: their
copies are other objects, or errors. One object in a value is one object in its copy. So the time for a copy grows with
the number of objects, not with the number of paths to them.
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
from ._class_attributes import ABSENT, dataclass_fields, inherited, own_attributes
from ._node_types import NUMPY_NUMBERS, compares_by_parts, frozen_mapping, is_namedtuple, parts_of_frozen
from ._printing import shown


class Static:
    """A static value with the key by which it is compared. It holds a copy, which no change outside can reach.

    Two instances are equal if their values have the same type and content.

    Args:
        value: Anything with an `==`; it need not be hashable.
        memo: Results shared by the `Static`s of one walk.
        is_exact: True keeps the caller's own object instead of a copy, for a tree that is only taken apart to be put
            together again. The key is still made from the content at this moment.

    Attributes:
        exact_objects: With `is_exact`, the `irreplaceable_objects` of the value, each in an `IdentityKey`. Otherwise
            empty.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.

    Cost: one walk over the containers in `value`, and a copy of the mutable ones.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_may_have_irreplaceable_objects", "_value", "exact_objects")

    def __init__(self, value: Any, memo: "StaticMemo | None" = None, *, is_exact: bool = False) -> None:
        """Makes the key of the value. Without `is_exact`, copies a mutable value and makes the key of the copy."""
        self._key, self._is_mutable, self._may_have_irreplaceable_objects = key_of(value, memo)
        self._value = value
        self.exact_objects: tuple[IdentityKey, ...] = ()
        if is_exact and self._may_have_irreplaceable_objects:
            exact_objects = irreplaceable_objects(value)
            self.exact_objects = tuple([IdentityKey(obj) for obj in exact_objects])
            # After the walk, `_pack_and_unpack` compares the recorded classes with those in the native key of the tree.
            # So it notices if somebody has assigned to `__class__` meanwhile. For other objects, `key_of` has recorded
            # the class where that is needed.
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
        """Returns the value for a new tree: a new copy if `is_copied` is True, else the stored object itself."""
        return self.copied_value(IdentityDict()) if self.is_copied else self._value

    def copied_value(self, copies: IdentityDict[Any]) -> Any:
        """Returns the value with a copy of everything mutable in it, as `copy_of` makes it, also of an exact value.

        Args:
            copies: The copies made so far. This call uses and extends them, so one object has one copy.
        """
        return copy_of(self._value, copies) if self._is_mutable else self._value

    def with_copy(self, copies: IdentityDict[Any]) -> "Static":
        """Returns an equal `Static` with the result of `copied_value(copies)` in place of the value."""
        twin = object.__new__(Static)
        twin._key, twin._hash = self._key, self._hash
        twin._is_mutable, twin._may_have_irreplaceable_objects = self._is_mutable, self._may_have_irreplaceable_objects
        twin._value, twin.exact_objects = self.copied_value(copies), self.exact_objects
        return twin

    @property
    def has_irreplaceable_objects(self) -> bool:
        """True if `irreplaceable_objects` finds any in the value. Unlike `exact_objects`, also without `is_exact`."""
        return self._may_have_irreplaceable_objects and bool(irreplaceable_objects(self._value))

    @property
    def is_copied(self) -> bool:
        """True if `thaw` makes a new copy each time."""
        return self._is_mutable and not self.exact_objects

    @property
    def is_mutable(self) -> bool:
        """True if the value, or anything in it, can be mutated. See `key_of` for what does not count."""
        return self._is_mutable

    @property
    def is_settled(self) -> bool:
        """True if the key of the value never changes, so that `is` is enough to recognise the value."""
        return not self._is_mutable and is_settled_value(self._value)

    def peek(self) -> Any:
        """Returns the stored object itself. The caller must neither change it nor let a user have it."""
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
    """Returns a static value in which the originals are in the places of their copies.

    A copy changed since it was made is not replaced.

    Args:
        value: A static value. If a container in it holds a replaced copy, a new container takes its place.
        originals: Copy → original.
    """
    # Part → its replacement, so that shared parts stay shared.
    replacements: IdentityDict[Any] = IdentityDict()

    def replacement_of(part: Any) -> Any:
        """Returns the replacement of one part; the part itself if there is nothing to replace."""
        if part in replacements:
            return replacements[part]
        original = originals.get(part, part)
        # A copy gives way to its original, unless the two differ by now. Anything else is searched for copies.
        if original is not part:
            replacement = original if Static(original) == Static(part) else part
        else:
            replacement = with_new_parts(part, replacement_of)
        replacements[part] = replacement
        return replacement

    return replacement_of(value)


def distinguishing_text(value: Any, counterpart: Any) -> str:
    """Returns the text of a value for a message about two different values.

    That is the text of `shown`. If it is the same for two values of one class, it is that of the first part in which
    they differ. (The parts of a dict are its pairs of key and value.) For two sequences of different lengths the length
    follows: "[1, 1, 1, 1, 1, 1, ...], 9 of them".

    Args:
        value: The value to show.
        counterpart: The value from which it differs. Its text is the result of a call with the two exchanged.
    """
    # While both texts are the same, go down to the first part that differs.
    while type(value) is type(counterpart) and shown(value) == shown(counterpart):
        # The class may be a subclass that has overridden any method. So those of the built-in classes are called.
        if isinstance(value, dict):
            value, counterpart = tuple(dict.items(value)), tuple(dict.items(counterpart))
        if not isinstance(value, (tuple, list)):
            break
        cls: Any = tuple if isinstance(value, tuple) else list
        parts, opposites = list(cls.__iter__(value)), list(cls.__iter__(counterpart))
        if len(parts) != len(opposites):
            return f"{shown(value)}, {len(parts)} of them"
        pairs = zip(parts, opposites, strict=True)
        differing = [(part, opposite) for part, opposite in pairs if Static(part) != Static(opposite)]
        # The values differ in something besides their items, so there is no better text.
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
        (key, is_mutable, may_have_irreplaceable_objects). `is_mutable` is True if the value or a part of it can be
        mutated. Objects that nobody mutates although it is possible do not count: a `functools.partial`, and an object
        with an `==` and a hash of its own. If `may_have_irreplaceable_objects` is False, `irreplaceable_objects` would
        find nothing in the value. If it is True, only a search can tell.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    # Nearly all values are small, and a nested key is cheaper, so it is tried first.
    key_maker = _KeyMaker(memo, is_nested=True)
    try:
        # The key is made first, because that sets the two flags.
        return key_maker.make_key(value), key_maker.is_mutable, key_maker.may_have_irreplaceable_objects
    except _TooManyPartsError:
        key_maker = _KeyMaker(new_static_memo() if memo is None else memo, is_nested=False)
        return key_maker.make_key(value), key_maker.is_mutable, key_maker.may_have_irreplaceable_objects


_MAX_NESTED = 200
"""The largest number of parts, counted by paths, in a value that gets a nested key."""


class _TooManyPartsError(Exception):
    """A value has more than `_MAX_NESTED` parts."""


class _KeyMaker:
    """Makes the key of one value: a nested tuple, or a row.

    Args:
        memo: Results of the same walk. A key of rows needs a memo.
        is_nested: True for a nested key, False for one of rows.

    Attributes:
        is_mutable: False at first. True as soon as a mutable part was read.
        may_have_irreplaceable_objects: False at first. True as soon as a part was read that `irreplaceable_objects` may
            list.
    """

    __slots__ = ("_is_nested", "_memo", "_parts_left", "is_mutable", "may_have_irreplaceable_objects")

    def __init__(self, memo: "StaticMemo | None", is_nested: bool) -> None:
        self.is_mutable = False
        self.may_have_irreplaceable_objects = False
        self._memo = memo
        self._is_nested = is_nested
        # A counter that goes down by one for each part. Below zero, a nested key is given up. A key of rows has no
        # limit, so there the counter goes on below zero: it shows how many parts were read between two moments.
        self._parts_left = _MAX_NESTED

    def make_key(self, value: Any) -> Any:
        """Makes the key of the value, or of one part of it.

        Returns:
            (class, value) for an instance of a class in `BY_VALUE`. For any other value, its content if the key is
            nested, and its row if not.

        Raises:
            Incomparable: If the value, or something in it, has no usable `==`.
            _TooManyPartsError: If the key was to be nested and has too many parts.
        """
        if type(value) in BY_VALUE:
            return type(value), value
        # An entry keeps its object alive, so an entry at this address is that of this object.
        entry = None if self._memo is None else self._memo.rows.get(id(value))
        if self._is_nested:
            # An earlier value of this walk held the same object, and it has too many parts for a nested key.
            if entry is not None and entry.num_parts > _MAX_NESTED:
                raise _TooManyPartsError
            return content_of(value, self)
        # The parts of an object count once for each path to the object. For the first path, `_make_entry` counts them
        # while it reads them. For each further path, they are subtracted here.
        if entry is None:
            entry = self._make_entry(value)
        else:
            self._parts_left -= entry.num_parts
        self.is_mutable |= entry.is_mutable
        self.may_have_irreplaceable_objects |= entry.may_have_irreplaceable_objects
        return entry.row

    def make_keys(self, parts: Collection[Any]) -> tuple[Any, ...]:
        """Makes the keys of some parts, and subtracts their number from the counter of parts.

        Raises:
            Incomparable: If something in the parts has no usable `==`.
            _TooManyPartsError: If the key was to be nested and has too many parts.
        """
        self._parts_left -= len(parts)
        if self._is_nested and self._parts_left < 0:
            raise _TooManyPartsError
        return tuple([self.make_key(part) for part in parts])

    def note_class(self, value: Any, cls: type) -> None:
        """Records the class of an object as it gets into the key. Does nothing without a memo."""
        if self._memo is not None:
            note_class(self._memo, value, cls)

    def _make_entry(self, value: Any) -> "_RowEntry":
        """Makes the row of an object not yet in the memo. Enters it in the memo, and returns the entry."""
        assert self._memo is not None
        was_mutable, parts_left_before = self.is_mutable, self._parts_left
        had_irreplaceable_objects = self.may_have_irreplaceable_objects
        # `content_of` sets the two flags to True if the object or a part of it calls for it. They are reset first, so
        # that afterwards they are about this object alone, for its entry.
        self.is_mutable = self.may_have_irreplaceable_objects = False
        row = _Row(content_of(value, self))
        row = _rows.intern(hash(row), row)
        # While the content was read, `make_keys` and `make_key` have taken one off the counter for each part, a part at
        # two paths twice. Above the limit the exact number does not matter.
        num_parts = min(parts_left_before - self._parts_left, _MAX_NESTED + 1)
        entry = _RowEntry(value, row, self.is_mutable, self.may_have_irreplaceable_objects, num_parts)
        self._memo.rows[id(value)] = entry  # the entry keeps the value alive
        # Now the flags are about the whole value again: they are True for this object, or for a part read before it.
        self.is_mutable |= was_mutable
        self.may_have_irreplaceable_objects |= had_irreplaceable_objects
        return entry


class _Row:
    """The content of one part of a large value. The table `_rows` makes rows with equal contents one object.

    `Interned` holds no lock while it compares two contents, since that may run a user's `==`.
    """

    __slots__ = ("__weakref__", "_hash", "content")

    def __init__(self, content: Any) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Does nothing: a row is complete when it is made. `Interned` calls this method of a new row."""

    def is_like(self, row: "_Row") -> bool:
        """Returns True if both rows have the same content."""
        return self.content == row.content


_rows: Interned[_Row] = Interned()


class _RowEntry(NamedTuple):
    """The row of one object, with what was found out while it was made.

    Attributes:
        value: The object. The entry keeps it alive.
        row: The object's row.
        is_mutable: True if the object or a part of it can be mutated.
        may_have_irreplaceable_objects: True if `irreplaceable_objects` may find any in the object.
        num_parts: The number of parts in the object, on all levels, counted by paths. `_MAX_NESTED + 1` if there are
            more.
    """

    value: Any
    row: _Row
    is_mutable: bool
    may_have_irreplaceable_objects: bool
    num_parts: int


class StaticMemo(NamedTuple):
    """Results shared by the `Static`s of one walk, many of which may hold the same large object.

    Attributes:
        rows: id → the entry of the object. The entry keeps the object alive.
        copies: Object → its copy. See `copy_of`.
        classes: id → the class that the object had when it was read. Only for objects compared by identity or by their
            own `==`, and for the irreplaceable objects of an exact walk. The objects are alive in their keys
            (`IdentityKey`, `_EqualityKey`).
    """

    rows: dict[int, _RowEntry]
    copies: IdentityDict[Any]
    classes: dict[int, type]


def new_static_memo() -> StaticMemo:
    """Makes an empty memo for one walk. No object may change while a memo is in use."""
    return StaticMemo({}, IdentityDict(), {})


def note_class(memo: StaticMemo, value: Any, cls: type) -> None:
    """Records the class of an object as it gets into a key.

    If the memo already has another class for the object, `_SeveralClasses` takes its place.
    """
    # The key keeps the object alive, so no other object gets its address.
    if memo.classes.setdefault(id(value), cls) is not cls:
        memo.classes[id(value)] = _SeveralClasses


class _SeveralClasses:
    """Mark in place of a class: the object's class changed during the walk. No object is of this class."""


# --- pickling ---------------------------------------------------------------------------------------------------------


def with_names(value: Any) -> Any:
    """Returns a value for a pickle, with the names of library functions in the places of the functions.

    Functions are looked for in tuples, and in tuples in these, but in no other containers. Plain functions, classes and
    everything in `__main__` stay as they are, since `cloudpickle` can write them by value.
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
    """A function pickled as its name.

    Pickle itself does this for plain functions alone, and `jax.nn.relu` is an instance of a class.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __reduce__(self) -> Any:
        return _named, (self.module, self.name)


def _named(module: str, name: str) -> Any:
    """Returns the object with this name in a module. Loading the pickle of a `_ByName` calls it."""
    return operator.attrgetter(name)(importlib.import_module(module))


# --- the kinds of static value ----------------------------------------------------------------------------------------


class _ArrayContent(tuple[Any, ...]):
    """The dtype, shape and bytes of an array, as one part of it. The `==` of the tuple compares all three."""

    __slots__ = ()


BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), _ArrayContent})
"""Classes whose instances are the same value exactly if type and `==` say so. The key is (class, value).

`float` is not among them, because `0.0 == -0.0`, and `nan` is not equal to itself.
"""

_IMMUTABLE = BY_VALUE | {float, complex, type, range, types.FunctionType, types.BuiltinFunctionType, types.MethodType}
"""Classes whose instances are never copied, and never change. (A function's attributes may; they do not count.)"""

_FIXED_CLASSES = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)
"""Classes whose instances, and those of all subclasses, never change."""

_NUMBERS_AND_TEXTS = (float, complex, int, str, bytes)
"""Classes of which `_bits_of` reads the value, also in instances of subclasses."""


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or hashing or copying it raised an error.

    Attributes:
        value: The object at fault.
        reason: What is wrong with the object, for the message: "its `==` returned list, not bool".
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


# --- the content by which a value is compared -------------------------------------------------------------------------


def content_of(value: Any, key_maker: _KeyMaker) -> Any:
    """Returns the content by which a value is compared: its class, and everything that tells it from other instances.

    Args:
        value: Any object of a class outside `BY_VALUE`.
        key_maker: Makes the keys of the parts. Its flag `is_mutable` is set if the value or a part of it is mutable,
            and `may_have_irreplaceable_objects` if `irreplaceable_objects` may list one.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    cls: Any = type(value)
    # Tuples are by far the most frequent values here, and looking them up in `_CONTAINERS` would take longer.
    if cls is tuple:
        return cls, key_maker.make_keys(value)
    # The class has no `==` of its own, so a value is equal only to itself. A partial has the `==` of `object`, too, but
    # is compared by its parts.
    if cls.__eq__ is object.__eq__ and cls is not functools.partial:
        if cls.__hash__ is not object.__hash__:
            # The answer does not matter. The call is here because it raises `Incomparable` if the `__hash__` of the
            # class fails.
            _is_hashable(value)
        key_maker.note_class(value, cls)
        return cls, IdentityKey(value)
    if cls in _NUMBERS_AND_TEXTS:
        return cls, _bits_of(value)
    base = _container_base(cls)
    if base is not None:
        return _content_of_container(value, base, key_maker)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    # From here on, the value may be an irreplaceable object.
    key_maker.may_have_irreplaceable_objects = True
    # The `==` of a tracer or a reference makes an array, or raises. So these are compared by identity.
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, IdentityKey(value)
    if isinstance(value, jax.Array):
        return _content_of_jax_array(value)
    if _compares_by_field(cls):
        return _content_of_dataclass(value, key_maker)
    if compares_by_parts(cls):
        return cls, key_maker.make_keys(_keys_and_values(_attributes_of(value)))
    # Any other class has an `==` of its own, and its answer decides.
    _require_equality(value)
    # A subclass of `float` inherits an `==` that takes 0.0 for -0.0.
    bits = _bits_of(value) if isinstance(value, _NUMBERS_AND_TEXTS) else None
    if _is_hashable(value):
        key_maker.note_class(value, cls)
        return cls, bits, _equality_key_of(value)
    # Without a hash, the object is likely to change.
    key_maker.is_mutable = True
    return cls, bits, _equality_key_of_copy(value)


def _content_of_container(value: Any, base: type, key_maker: _KeyMaker) -> Any:
    """Returns the content of a container: its class and the keys of its parts.

    If a subclass of a built-in class has its own `==`, a key compared by this `==` belongs to the content, too.

    Args:
        value: The container.
        base: The class in `_CONTAINERS` to which it belongs: its own class, or a base of that.
        key_maker: As for `content_of`.
    """
    cls, container = type(value), _CONTAINERS[base]
    # `irreplaceable_objects` may list the container if it is mutable, a partial, or an instance of a subclass. A
    # namedtuple counts as a subclass only if it is more than its items.
    if container.is_mutable or (cls is not base and not _is_only_its_items(cls)) or cls is functools.partial:
        key_maker.may_have_irreplaceable_objects = True
    if container.is_mutable:
        key_maker.is_mutable = True
    parts = key_maker.make_keys(container.parts(value))
    content = parts if container.is_ordered else frozenset(parts)
    # Without an `==` of its own, class and parts decide. So they do for arrays, whose `==` gives an array of answers.
    if cls is base or cls.__eq__ is base.__eq__ or base is np.ndarray:
        return cls, content
    # The `==` of a subclass decides, too: it may compare attributes besides the items.
    _require_equality(value)
    return cls, content, _equality_key_of_copy(value)


def _content_of_dataclass(value: Any, key_maker: _KeyMaker) -> Any:
    """Returns the content of a dataclass with a generated `==`: class, names of the compared fields, and their keys."""
    cls: Any = type(value)
    # A field that was never set has no value to compare. One declared with `compare=False` is not compared.
    compared = [field.name for field in dataclass_fields(cls) if field.compare and hasattr(value, field.name)]
    was_mutable = key_maker.is_mutable
    parts = key_maker.make_keys([getattr(value, name) for name in compared])
    if _can_be_mutated(cls):
        key_maker.is_mutable = True
    elif _defines_hash(cls):
        # By a hash written by hand, a class promises that its instances do not change. So the flag becomes again what
        # it was before the fields were read: a list in a field does not count as mutable.
        key_maker.is_mutable = was_mutable
    return cls, tuple(compared), parts


def _content_of_jax_array(value: jax.Array) -> Any:
    """Returns the content of a JAX array: dtype, shape and bytes. For PRNG keys, the bytes are those of the keys."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


def _bits_of(value: Any) -> Any:
    """Returns a number or text, of one of `_NUMBERS_AND_TEXTS` or a subclass, in a form that compares strictly.

    A float or complex number becomes bytes, so that 0.0 and -0.0 differ and `nan` equals itself. Any other value
    becomes an instance of the built-in class. For example, an instance of a subclass of `str` becomes a `str`.
    """
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    base: Any = next(base for base in (int, str, bytes) if isinstance(value, base))
    instance: Any = value
    # `+value` and `value[:]` make an instance of the built-in class. A subclass may override these operators, so the
    # methods of the built-in class are called.
    return base.__pos__(instance) if base is int else base.__getitem__(instance, slice(None))


class IdentityKey:
    """A key equal only to keys of the same object. It keeps the object alive."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is IdentityKey and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _EqualityKey:
    """A key equal to keys of the same object, and to keys of equal objects of the same type.

    The hash is given once and kept. So if a hashable object changes all the same, its key still has the hash of before.
    `jax.jit` does the same with its static arguments.
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
        """Does nothing: a key is complete when it is made. `Interned` calls this method of a new key."""

    def is_like(self, key: "_EqualityKey") -> bool:
        """Returns True if both keys are equal."""
        return self == key


_interned_keys: Interned[_EqualityKey] = Interned()
"""Keys of hashable objects. Equal ones are one object."""

_first_keys: WeakIdentityDict["weakref.ref[_EqualityKey]"] = WeakIdentityDict()
"""Hashable object with an `==` of its own → reference to its first key, which is dead once no structure has this key.

The key of an object may have been made for an equal object in an earlier structure.
"""


def _equality_key_of(value: Any) -> _EqualityKey:
    """Returns the key of a hashable object: the key it got before, as long as that is alive.

    So its hash stays the same. As with static arguments of `jax.jit`, a change of a hashable object is not noticed.
    """
    reference = _first_keys.get(value)
    first_key = None if reference is None else reference()
    if first_key is not None:
        return first_key
    hash_value = hash(value)
    key = _interned_keys.intern(hash_value, _EqualityKey(value, hash_value))
    with contextlib.suppress(TypeError):  # instances of the class cannot be referred to weakly
        _first_keys[value] = weakref.ref(key)
    return key


def _equality_key_of_copy(value: Any) -> _EqualityKey:
    """Makes the key of an object that may change: from a copy, and with the hash of its class in place of its own."""
    return _EqualityKey(copy_of(value, IdentityDict()), hash(type(value)))


def _require_equality(value: Any) -> None:
    """Raises `Incomparable` unless `value == value` returns a bool. The answer may be False, as for `nan`."""
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


def _is_equal(value: Any, counterpart: Any) -> bool:
    """Returns the result of `value == counterpart` as a bool. Turns any exception into `Incomparable`."""
    try:
        return bool(value == counterpart)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__eq__` raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None


def _is_hashable(value: Any) -> bool:
    """Returns True if an object can be hashed, False if that raises `TypeError`. Other errors become `Incomparable`."""
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_of(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies everything mutable in a value. The copy shares the rest with the value.

    An object whose class has a hash written by hand counts as immutable, whatever it holds.

    Args:
        value: Any static value.
        copies: The copies made so far. This call uses and extends them, so one object has one copy.

    Returns:
        The copy; the value itself if no part of it is copied. See the table at the top of this file.

    Raises:
        Incomparable: If copying an object raises, or comparing it with its copy.
    """
    cls: Any = type(value)
    # JAX's arrays are immutable. A `jax.Ref` can be written. Under a trace it may be an instance of `jax.Array`, too.
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
    # Any other class with a hash promises the same. The classes of `compares_by_parts`, which libraries name, are
    # immutable as well.
    elif compares_by_parts(cls) or _is_hashable(value):
        copied = value
    else:
        copied = _copy_unhashable(value, copies)
    copies[value] = copied
    return copied


def _copy_dataclass(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies a dataclass with a generated `==`. Returns the object itself if it is frozen and holds nothing mutable.

    Raises:
        Incomparable: If copying the object or a part of it raises.
    """
    if _can_be_mutated(type(value)):
        return _copy_by_parts(value, copies, _shallow_copy_of_dataclass)
    # It is frozen, so it needs a copy only if one of its parts does.
    names = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    new_parts = {name: copy_of(getattr(value, name), copies) for name in names}
    if all(getattr(value, name) is new_parts[name] for name in names):
        return value
    clone = _run_copier(_shallow_copy_of_dataclass, value)
    for name, part in new_parts.items():
        object.__setattr__(clone, name, part)
    return clone


def _shallow_copy_of_dataclass(value: Any) -> Any:
    """Returns the result of `copy.copy`, but always another object, and of the same class."""
    clone = copy.copy(value)
    if clone is not value and type(clone) is type(value):
        return clone
    # A frozen class may have a `__copy__` that returns the object itself. But the caller changes the copy.
    clone = object.__new__(type(value))
    for name, part in own_attributes(value).items():
        vars(clone)[name] = part
    for slot in _slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # never set
            slot.__set__(clone, slot.__get__(value))
    return clone


def _copy_unhashable(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies an object with an `==` of its own and no hash. Returns the object itself if the copy is not equal to it.

    Raises:
        Incomparable: If copying the object or a part of it raises, or comparing it with its copy.
    """
    # Copies beyond this number are those of the object and its parts.
    size_before = len(copies)
    if hasattr(value, "__dict__") or _slots_of(type(value)):
        clone = _copy_by_parts(value, copies)
    else:
        clone = _run_copier(copy.deepcopy, value)
    if clone is value or _is_equal(value, clone):
        return clone
    # The clone is given up. Copies of its parts may refer to it, so they are removed from `copies`, too.
    copies.forget_after(size_before)
    return value


def _copy_by_parts(value: Any, copies: IdentityDict[Any], shallow_copier: Callable[[Any], Any] = copy.copy) -> Any:
    """Copies an object by a function such as `copy.copy`, and then its attributes and slots one by one.

    Returns:
        The copy. The object itself if the function returns that, or returns an object of another class.

    Raises:
        Incomparable: If copying the object or a part of it raises.
    """
    clone = _run_copier(shallow_copier, value)
    if clone is value or type(clone) is not type(value):
        return value
    # The clone is entered before the parts are copied, because a part may lead back to the object.
    copies[value] = clone
    _copy_attributes(value, clone, copies)
    return clone


def _run_copier(copier: Callable[[Any], Any], value: Any) -> Any:
    """Calls a function such as `copy.copy`, and turns any exception into `Incomparable`."""
    try:
        # Under a trace, copies of arrays in the object would be tracers.
        with jax.ensure_compile_time_eval():
            return copier(value)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__copy__` raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_attributes(value: Any, clone: Any, copies: IdentityDict[Any]) -> None:
    """Copies the attributes and slots of an object into a copy that has no copies of them yet.

    Args:
        value: The object.
        clone: The copy. For a container, its items were copied already.
        copies: The copies made so far. This call uses and extends them.

    Raises:
        Incomparable: If copying a part raises.
    """
    # A list, because another thread may add an attribute meanwhile.
    for name, part in list(own_attributes(value).items()):
        # The clone has the very object of the original, or lacks the attribute. If the `__copy__` of the class has put
        # another object here, this belongs to the clone alone already, and stays.
        if vars(clone).get(name, part) is part:
            vars(clone)[name] = copy_of(part, copies)
    for slot in _slots_of(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:  # never set
            continue
        # The slot is set even if `__copy__` has put another object here. Slots of classes in C may be read-only. There
        # the clone keeps what it has.
        with contextlib.suppress(AttributeError, TypeError):
            slot.__set__(clone, copy_of(part, copies))


def _slots_of(cls: type) -> list[Any]:
    """Returns the descriptors of the slots of a class and its bases."""
    descriptors = [entry for base in cls.__mro__ for entry in vars(base).values()]
    return [entry for entry in descriptors if type(entry) is types.MemberDescriptorType]


def with_new_parts(value: Any, new_part: "_NewPart") -> Any:
    """Returns a container of the same class as the value, with new parts.

    Args:
        value: Any static value. It is taken apart only if it is a container of a built-in class, or a namedtuple that
            is only its items.
        new_part: part → the object to put in its place, or the part itself. Called more than once for a part.

    Returns:
        The new container; the value itself if it is not taken apart, or if `new_part` replaces nothing. Elements of
        sets and keys of dictionaries are not replaced: what `new_part` returns for these is not used.
    """
    cls = type(value)
    # Subclasses are not taken apart, because they may have attributes besides their items.
    container = _CONTAINERS.get(tuple if _is_only_its_items(cls) else cls)
    if container is None or all(new_part(part) is part for part in container.parts(value)):
        return value
    return container.copy(value, new_part)


# --- settled values ---------------------------------------------------------------------------------------------------


class SettledAnswer:
    """The answer of `is_settled_value` for one value. It is preliminary until there are answers for the parts, too.

    Attributes:
        is_settled: False once the key of the value itself, or of a part, turned out to be able to change.
        parts: The parts whose answers are still to be taken into account. Empty afterwards.
    """

    __slots__ = ("is_settled", "parts")

    def __init__(self, value: Any) -> None:
        parts = _deciding_parts(value)
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


def is_settled_value(value: Any, answers: IdentityDict[SettledAnswer] | None = None) -> bool:
    """Returns True if the key of a value never changes, so that the address of the object can stand for the value.

        kind of value                                   is settled
        number, text, function                          always
        object compared by identity, such as a lock     always, because its key is its address, whatever changes in it
        tuple, `functools.partial`, frozen dataclass    if all of its parts are
        what a library declares immutable               if all of its parts are
        frozen dataclass with a hash written by hand    always, because such a hash is a promise
        list, mutable dataclass, any other object       never

    A `functools.partial` and a frozen dataclass could be changed, but nobody does that.

    Args:
        value: Any static value that has a key. (One that contains itself has none.)
        answers: The answers so far. This call uses and extends them.
    """
    answers = IdentityDict() if answers is None else answers
    # Each value is on top of the stack at least twice: on the way down, and again after its parts.
    stack = [value]
    while stack:
        answer = answers.get(stack[-1])
        # On the way down, the parts are put on top of the value.
        if answer is None:
            answer = answers[stack[-1]] = SettledAnswer(stack[-1])
            stack.extend(answer.parts)
            continue
        # On the way up, all parts have an answer.
        stack.pop()
        answer.is_settled = answer.is_settled and all(answers[part].is_settled for part in answer.parts)
        answer.parts = ()
    return answers[value].is_settled


def _deciding_parts(value: Any) -> Iterable[Any] | None:
    """Returns the parts that decide whether a value is settled.

    Returns:
        The parts, if the value is settled exactly if all of them are. `()` if the value is always settled. None if it
        never is: it can itself be changed, or nothing is known about its class.
    """
    cls: type = type(value)
    container = _CONTAINERS.get(tuple if is_namedtuple(cls) else cls)
    if container is not None:
        return None if container.is_mutable else container.parts(value)
    # The key of any of these is its content, which never changes, or its address.
    if cls in _IMMUTABLE or has_settled_instances(cls) or issubclass(cls, np.generic):
        return ()
    # A frozen dataclass changes only through its fields. Fields that are not compared are no part of the key. One of
    # them may lead back to the object, like the link of a node to its parent.
    if _compares_by_field(cls) and not _can_be_mutated(cls):
        if _defines_hash(cls):
            return ()
        names = [field.name for field in dataclass_fields(cls) if field.compare]
        return [getattr(value, name) for name in names if hasattr(value, name)]
    if compares_by_parts(cls):
        return _attributes_of(value).values()
    return parts_of_frozen(value)


def has_settled_instances(cls: type) -> bool:
    """Returns True if all instances of a class are settled, whatever parts they have.

    This is so for objects that are compared by identity, such as classes, and for dtypes, shardings and meshes.
    """
    # A partial has the `==` of `object`, but is compared by its parts.
    if cls is functools.partial:
        return False
    return cls is type or cls.__eq__ is object.__eq__ or issubclass(cls, _FIXED_CLASSES)


# --- reading the content in C -----------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Directions for the native walk: how it reads the content of a static value of one class.

    Attributes:
        shape: the name of a way to read it, see `_native_walk.c`. "FIELDS" for a dataclass, "ITEMS" for a namedtuple,
            "MAPPING" for a mapping that nobody changes, "BYTES" for arrays and numbers of NumPy, "EQUAL" for a class
            whose `==` and hash decide.
        names: the attributes to read.
    """

    shape: str
    names: tuple[str, ...] = ()


def reading_of(cls: Any) -> Reading | None:
    """Returns how C reads the content of the instances of a class. None if it cannot, so that Python has to be asked.

    Values with equal contents must have equal keys (`key_of`). So each case here is one of `content_of`.
    """
    if _is_only_its_items(cls):
        return Reading("ITEMS")
    if cls is jax.tree_util.PyTreeDef:
        return Reading("EQUAL")
    # A subclass may have attributes besides.
    if cls is np.ndarray or cls in NUMPY_NUMBERS:
        return Reading("BYTES", ("dtype", "shape"))
    if _container_base(cls) is not None or issubclass(cls, (*_NUMBERS_AND_TEXTS, np.generic, jax.Array, Tracer)):
        return None
    # The same look-up as `getattr`, if no code of the class takes part in it.
    if inherited(cls, "__getattribute__") is not object.__dict__["__getattribute__"]:
        return None
    attribute = frozen_mapping(cls)
    if attribute is not None:
        return Reading("MAPPING", (attribute,))
    if not _compares_by_field(cls):
        return None
    names = tuple([sys.intern(field.name) for field in dataclass_fields(cls) if field.compare])
    return Reading("FIELDS", names) if all(map(functools.partial(_is_read_simply, cls), names)) else None


def _is_read_simply(cls: type, name: str) -> bool:
    """Returns True if a field stands in a slot or in the `__dict__` of each instance, and in no property."""
    attribute = inherited(cls, name)
    is_slot = type(attribute) is types.MemberDescriptorType
    return attribute is ABSENT or is_slot or not hasattr(type(attribute), "__get__")


def parts_to_read(value: Any) -> Iterable[Any]:
    """Returns the parts of a static value in which C may meet further classes to read, and perhaps others."""
    cls = type(value)
    reading = reading_of(cls)
    if reading is not None and reading.shape != "ITEMS":
        return [getattr(value, name) for name in reading.names if hasattr(value, name)]
    if cls in (tuple, list) or reading is not None:
        return value
    return [*value, *value.values()] if cls is dict else ()


def has_kept_hash(value: Any) -> bool:
    """Returns False if the hash of a hashable object has changed since its first key was made.

    Its key is still the one of before (`_equality_key_of`), so its present content must not lead to this key.
    """
    reference = _first_keys.get(value)
    first_key = None if reference is None else reference()
    return first_key is None or hash(value) == hash(first_key)


# --- irreplaceable objects --------------------------------------------------------------------------------------------

_INTERCHANGEABLE = BY_VALUE | {float, complex, range, types.MethodType, types.BuiltinFunctionType}
"""Classes of values that any equal value can replace."""

_MANY_PARTS = 200
"""The number of visits from which on a search remembers what it has visited. Before, visiting twice is cheaper."""


def irreplaceable_objects(value: Any) -> list[Any]:
    """Lists the objects in a static value, itself included, for which an equal object is no substitute.

    Lists and configs are irreplaceable: a user can tell by `is` whether a model still has the same one, and an `==` may
    compare only some attributes. Numbers, texts and tuples are not, since they are nothing but their value. Functions
    and devices are not either: no other object is equal to one.

    Returns:
        The objects in the order of the walk, without repetitions, and without objects that are only inside of them.
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
        # An object that equals only itself need not be listed: no other object can take its place. A partial has the
        # `==` of `object`, too, but is compared by its parts.
        equals_only_itself = cls.__eq__ is object.__eq__ and cls is not functools.partial
        if equals_only_itself or issubclass(cls, (np.generic, enum.Enum, *_FIXED_CLASSES)):
            continue
        # A slice, a frozenset or a namedtuple is searched, and so is what a library declares immutable. Any other
        # object is listed.
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
    """Returns True for a dataclass with a generated `==`.

    The fields are compared one by one, and this `==` is not called: to it, `1` equals `True`.
    """
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    # `dataclass(eq=True)` keeps an `__eq__` that the class defines. A generated one was compiled from a string, and its
    # code says so in place of a file name.
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _defines_hash(cls: Any) -> bool:
    """Returns True for a class with a hash written by hand, by which it promises that its instances do not change."""
    code = getattr(cls.__dict__.get("__hash__"), "__code__", None)
    return code is not None and code.co_filename != "<string>"


def _can_be_mutated(cls: Any) -> bool:
    """Returns True for a mutable container, and for a dataclass with a generated `==` that is not frozen."""
    return issubclass(cls, _MUTABLE) or (_compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def _is_only_its_items(cls: Any) -> bool:
    """Returns True for a namedtuple without attributes besides its items, and with no `==` of its own."""
    return is_namedtuple(cls) and cls.__eq__ is tuple.__eq__ and cls.__dictoffset__ == 0


def _container_base(cls: type) -> type | None:
    """Returns the class in `_CONTAINERS` to which a class belongs: itself, or a base. None if there is none.

    Subclasses of `functools.partial` do not count as containers.
    """
    if cls in _CONTAINERS:
        return cls
    if not issubclass(cls, _WITH_SUBCLASSES):
        return None
    return next(base for base in _WITH_SUBCLASSES if issubclass(cls, base))


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the `__dict__` of an instance, without calling a `__getattribute__` of its class."""
    return object.__getattribute__(value, "__dict__")


# --- containers: their parts and copies -------------------------------------------------------------------------------
# The functions below are the entries of `_CONTAINERS`. `value` may be an instance of a subclass, which may have
# overridden any method. So they call the methods of the built-in class: `list.extend(value, ...)`.

_NewPart = Callable[[Any], Any]
"""part → the object in its place in the new container"""


class _Container(NamedTuple):
    """One kind of container.

    Attributes:
        is_mutable: True if an instance can be changed.
        parts: instance → the values by which it is compared, beside its class.
        copy: (instance, function) → a container of the same class with the results of the function in place of the
            parts. The instance itself if it is immutable and no part is replaced. Elements of sets, keys of
            dictionaries and bounds of a `range` are not passed to the function, and stay.
        is_ordered: True if two instances with the same parts in different orders differ.
    """

    is_mutable: bool
    parts: Callable[[Any], Collection[Any]]
    copy: Callable[[Any, _NewPart], Any]
    is_ordered: bool = True


def _keys_and_values(mapping: dict[Any, Any]) -> list[Any]:
    """Returns the keys and then the values of a dictionary, in its order."""
    return [*dict.keys(mapping), *dict.values(mapping)]


def _parts_of_ordered_dict(mapping: "collections.OrderedDict[Any, Any]") -> list[Any]:
    """Returns the keys and then the values of an `OrderedDict`, in its order.

    That of `dict.keys` is another one after `move_to_end`.
    """
    keys = list(collections.OrderedDict.__iter__(mapping))
    return [*keys, *[dict.__getitem__(mapping, key) for key in keys]]


def _parts_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    """Returns dtype, shape and bytes of an array as one part. For dtype `object`, elements replace the bytes."""
    # The view is a plain array: `tobytes` of a masked array would leave out the masked elements.
    array = value.view(np.ndarray)
    if array.dtype.hasobject:
        content: list[Any] = [_ArrayContent((array.dtype, array.shape)), *array.ravel().tolist()]
    else:
        content = [_ArrayContent((array.dtype, array.shape, array.tobytes()))]
    # A subclass has its mask or its unit in attributes.
    return content if type(value) is np.ndarray else [*content, *_keys_and_values(getattr(value, "__dict__", {}))]


def _same_object(value: Any, _: _NewPart) -> Any:
    """Returns the value itself, for immutable containers whose parts are not replaced."""
    return value


def _copy_tuple(value: Any, copy_part: _NewPart) -> Any:
    parts = [copy_part(part) for part in tuple.__iter__(value)]
    is_unchanged = all(part is copied for part, copied in zip(tuple.__iter__(value), parts, strict=True))
    return value if is_unchanged else tuple.__new__(type(value), parts)


def _copy_slice(value: slice, copy_part: _NewPart) -> slice:
    bounds = value.start, value.stop, value.step
    copied = _copy_tuple(bounds, copy_part)
    return value if copied is bounds else slice(*copied)


def _copy_partial(value: functools.partial[Any], copy_part: _NewPart) -> functools.partial[Any]:
    func, args = copy_part(value.func), _copy_tuple(value.args, copy_part)
    keywords = {name: copy_part(part) for name, part in value.keywords.items()}
    has_new_keyword = any(part is not keywords[name] for name, part in value.keywords.items())
    if func is value.func and args is value.args and not has_new_keyword:
        return value
    return functools.partial(func, *args, **keywords)


def _copy_list(value: Any, copy_part: _NewPart) -> Any:
    clone = list.__new__(type(value))
    list.extend(clone, [copy_part(part) for part in list.__iter__(value)])
    return clone


def _copy_dict(value: Any, copy_part: _NewPart) -> Any:
    clone = dict.__new__(type(value))
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_ordered_dict(value: Any, copy_part: _NewPart) -> Any:
    clone = collections.OrderedDict.__new__(type(value))
    for key in collections.OrderedDict.__iter__(value):
        collections.OrderedDict.__setitem__(clone, key, copy_part(dict.__getitem__(value, key)))
    return clone


def _copy_default_dict(value: Any, copy_part: _NewPart) -> Any:
    clone = collections.defaultdict.__new__(type(value))
    collections.defaultdict.__init__(clone, value.default_factory)
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_set(value: Any, _: _NewPart) -> Any:
    clone = set.__new__(type(value))
    set.update(clone, set.__iter__(value))
    return clone


def _copy_bytearray(value: Any, _: _NewPart) -> Any:
    clone = bytearray.__new__(type(value))
    bytearray.extend(clone, bytes(value))
    return clone


def _copy_deque(value: Any, copy_part: _NewPart) -> Any:
    clone = collections.deque.__new__(type(value))
    parts = [copy_part(part) for part in collections.deque.__iter__(value)]
    collections.deque.__init__(clone, parts, value.maxlen)
    return clone


def _copy_array(value: Any, copy_part: _NewPart) -> Any:
    clone = np.ndarray.copy(value)
    if clone.dtype.hasobject:
        elements = clone.view(np.ndarray)
        for index in np.ndindex(elements.shape):
            elements[index] = copy_part(elements[index])
    return clone


def _copy_mapping_proxy(value: Any, copy_part: _NewPart) -> Any:
    return types.MappingProxyType({key: copy_part(part) for key, part in value.items()})


def _copy_namespace(value: Any, copy_part: _NewPart) -> Any:
    clone = types.SimpleNamespace.__new__(type(value))
    vars(clone).update({name: copy_part(part) for name, part in vars(value).items()})
    return clone


_CONTAINERS: dict[type, _Container] = {
    tuple: _Container(False, lambda value: list(tuple.__iter__(value)), _copy_tuple),
    # The elements of a set can be hashed, so they are not copied.
    frozenset: _Container(False, lambda value: list(frozenset.__iter__(value)), _same_object, is_ordered=False),
    slice: _Container(False, lambda value: (value.start, value.stop, value.step), _copy_slice),
    # By its parts, and not by `==`: `range(0, 3, 2) == range(0, 4, 2)`, but a user can see which of the two it is.
    range: _Container(False, lambda value: (value.start, value.stop, value.step), _same_object),
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
