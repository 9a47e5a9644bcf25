"""Static values: what is not traced is part of the structure, and is compared strictly, by type and by value.

`1`, `True` and `1.0` differ, `0.0` and `-0.0` differ, `nan` equals itself, arrays compare by dtype, shape and bytes.
A value that can be mutated is copied when its `Static` is made, so a later mutation shows up as a difference. It is
copied again for each trace that receives it, so no trace can change the value of another one.

Values are compared by keys. A key is a nested tuple, which Python hashes and compares:

    [1, "a"]   →   (list, ((int, 1), (str, "a")))

Python walks a nested tuple once per *path*. A tuple that holds one tuple twice, and so on 60 levels deep, has 2^60
paths. So a value of more than 200 parts, counted by paths, gets a key in which each part is a row. Equal rows are one
object (hash consing, Ershov 1958), made once for each object in the value and compared by `is`. The value alone decides
which of the two kinds of key it gets, so equal values have equal keys.
"""

import importlib
import operator
import sys
import types
from collections.abc import Collection
from typing import Any, NamedTuple

from ._by_identity import IdentityDict, Interned
from ._printing import shown
from ._static_kinds import (
    BY_VALUE,
    IdentityKey,
    cannot_change,
    content_of,
    copy_of,
    objects_with_identity,
    with_new_parts,
)


class Static:
    """A value, compared strictly and safe from changes outside.

    Two are equal if their values have the same type and content.

    Args:
        value: Anything with an `==`; it need not be hashable.
        memo: Results shared by the `Static`s of one walk.
        is_exact: True keeps the caller's own object instead of a copy, for a tree that is only taken apart to be put
            together again. The key is still made of the content at this moment.

    Attributes:
        objects: The result of `objects_with_identity` for an exact value, each in an `IdentityKey`; else empty.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.

    Cost: one walk over the containers in `value`, and a copy of the mutable ones.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_may_have_objects", "_value", "objects")

    def __init__(self, value: Any, memo: "StaticMemo | None" = None, *, is_exact: bool = False) -> None:
        """Reads the key of the value and, unless the value is exact, copies the mutable parts."""
        self._key, self._is_mutable, self._may_have_objects = key_of(value, memo)
        self._value = value
        self.objects: tuple[IdentityKey, ...] = ()
        if is_exact and self._may_have_objects:
            objects = objects_with_identity(value)
            self.objects = tuple([IdentityKey(obj) for obj in objects])
            if memo is not None:
                for obj in objects:
                    note_class(memo, obj, type(obj))
        elif self._is_mutable and not is_exact:
            memo = new_static_memo() if memo is None else memo
            self._value = copy_of(value, memo.copies)
            # Another thread may have changed the value after its key was read and before it was copied. Only the copy
            # stays what it is, so the key must be the one of the copy.
            self._key, _, _ = key_of(self._value, memo)
        self._hash = hash(self._key)

    def thaw(self) -> Any:
        """Returns the value for a new tree: the object itself if it is immutable or exact, else a new copy."""
        return self.copied(IdentityDict()) if self.is_copied else self._value

    def copied(self, copies: IdentityDict[Any]) -> Any:
        """Returns the value with a copy of everything mutable in it, owned by the caller. See `copy_of`."""
        return copy_of(self._value, copies) if self._is_mutable else self._value

    def with_copy(self, copies: IdentityDict[Any]) -> "Static":
        """Returns an equal `Static` that holds the result of `copied(copies)`."""
        twin = object.__new__(Static)
        twin._key, twin._hash = self._key, self._hash
        twin._is_mutable, twin._may_have_objects = self._is_mutable, self._may_have_objects
        twin._value, twin.objects = self.copied(copies), self.objects
        return twin

    @property
    def has_objects(self) -> bool:
        """True if `objects_with_identity` finds anything in the value."""
        return self._may_have_objects and bool(objects_with_identity(self._value))

    @property
    def is_copied(self) -> bool:
        """True if `thaw` makes a new copy each time."""
        return self._is_mutable and not self.objects

    @property
    def is_mutable(self) -> bool:
        """True if anyone who has the value could change it, or anything in it."""
        return self._is_mutable

    @property
    def is_settled(self) -> bool:
        """True if the object keeps its value for ever, so that `is` is enough to recognise it."""
        return not self._is_mutable and cannot_change(self._value)

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
    """Replaces the copies in a static value by their originals.

    A copy stays if it was changed since it was made.

    Args:
        value: A static value. Containers are entered, and made anew if they hold a copy.
        originals: Copy → original.
    """
    replacements: IdentityDict[Any] = IdentityDict()

    def replaced(part: Any) -> Any:
        """Returns the replacement of one part, computed once per object."""
        if part in replacements:
            return replacements[part]
        original = originals.get(part, part)
        if original is not part:
            replacement = original if Static(original) == Static(part) else part
        else:
            replacement = with_new_parts(part, replaced)
        replacements[part] = replacement
        return replacement

    return replaced(value)


def shown_beside(value: Any, counterpart: Any) -> str:
    """Prints a value for an error beside a different one. If both print alike, prints the first differing part."""
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
        The key; True if anything in the value can be mutated in practice (nobody mutates a `functools.partial`);
        and False if `objects_with_identity` is certain to find nothing in it.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    # Nearly all values are small, and a nested key is the cheaper one, so that is tried first.
    keys = _KeyMaker(memo, is_nested=True)
    try:
        return keys.key_of(value), keys.is_mutable, keys.may_have_objects
    except _TooManyPartsError:
        keys = _KeyMaker(new_static_memo() if memo is None else memo, is_nested=False)
        return keys.key_of(value), keys.is_mutable, keys.may_have_objects


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
        may_have_objects: True once `objects_with_identity` may list a part.
    """

    __slots__ = ("_is_nested", "_memo", "_room", "is_mutable", "may_have_objects")

    def __init__(self, memo: "StaticMemo | None", is_nested: bool) -> None:
        self.is_mutable = False
        self.may_have_objects = False
        self._memo = memo
        self._is_nested = is_nested
        # The number of parts that may still come before a nested key is given up. Keys of rows count on below zero.
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
            # An earlier value of this walk held the same large object: no need to count its parts again.
            if entry is not None and entry.num_parts > _MAX_NESTED:
                raise _TooManyPartsError
            return content_of(value, self)
        if entry is None:
            entry = self._new_entry(value)
        else:
            self._room -= entry.num_parts
        self.is_mutable |= entry.is_mutable
        self.may_have_objects |= entry.may_have_objects
        return entry.row

    def keys_of(self, parts: Collection[Any]) -> tuple[Any, ...]:
        """Makes the keys of the parts of a container."""
        self._room -= len(parts)
        if self._is_nested and self._room < 0:
            raise _TooManyPartsError
        return tuple([self.key_of(part) for part in parts])

    def note_class(self, value: Any, cls: type) -> None:
        """Records the class of an object in the key."""
        if self._memo is not None:
            note_class(self._memo, value, cls)

    def _new_entry(self, value: Any) -> "_RowEntry":
        """Makes the row of an object and enters it in the memo."""
        assert self._memo is not None
        was_mutable, had_objects, room_before = self.is_mutable, self.may_have_objects, self._room
        # The flags are reset, so that after the next line they speak of this object alone.
        self.is_mutable = self.may_have_objects = False
        row = _Row(content_of(value, self))
        row = _rows.intern(hash(row), row)
        num_parts = min(room_before - self._room, _MAX_NESTED + 1)
        entry = _RowEntry(value, row, self.is_mutable, self.may_have_objects, num_parts)
        self._memo.rows[id(value)] = entry  # alive in the entry
        self.is_mutable |= was_mutable
        self.may_have_objects |= had_objects
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
        may_have_objects: See `_KeyMaker`.
        num_parts: The number of its parts, counted by paths, and at most `_MAX_NESTED + 1`.
    """

    value: Any
    row: _Row
    is_mutable: bool
    may_have_objects: bool
    num_parts: int


class StaticMemo(NamedTuple):
    """Results shared by the `Static`s of one walk, many of which may hold the same large object.

    Attributes:
        rows: id → the object, kept alive by the entry, and its row.
        copies: Object → its copy. See `copy_of`.
        classes: id → the object's class when it was read. Only for objects with an `IdentityKey` or an equality key,
            which keeps them alive.
    """

    rows: dict[int, _RowEntry]
    copies: IdentityDict[Any]
    classes: dict[int, type]


def new_static_memo() -> StaticMemo:
    """Makes an empty memo for one walk. No object may change while a memo is in use."""
    return StaticMemo({}, IdentityDict(), {})


def note_class(memo: StaticMemo, value: Any, cls: type) -> None:
    """Records the class of an object in a key. Detects a change of class during the walk."""
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
