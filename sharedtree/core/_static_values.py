"""What is not traced is part of the structure, and is compared strictly: by type and by value.

`1`, `True` and `1.0` differ, `0.0` and `-0.0` differ, `nan` equals itself, arrays compare by dtype, shape and bytes.
What can be mutated is copied when the `Static` is made, so that a later mutation is seen as the difference that it
is, and copied again for each trace that gets it, so that no trace can change another's.

A value becomes a key of nested tuples, which Python hashes and compares: `[1, "a"]` is
`(list, ((int, 1), (str, "a")))`.
Python does that once for each *path*, and a tuple that holds one tuple twice, and so on 60 levels deep, has 2^60 of
them. So in the key of what has more than 200 parts, counted by paths, each part is a row, and equal rows are one
object (hash consing, Ershov 1958), which is made once for each object in the value, and compared by `is`. Which of the
two forms a key has depends on the value alone, so equal values have equal keys.
"""

import importlib
import operator
import sys
import types
from collections.abc import Collection
from typing import Any, NamedTuple

from ._by_identity import IdentityDict
from ._interned_objects import Interned
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


class _Known(NamedTuple):
    """What is known of one object.

    Attributes:
        value: The object.
        row: What it is made of.
        is_mutable: Whether anything in it can be mutated.
        may_have_objects: See `_Keys`.
        num_parts: The number of its parts, counted by paths, or one more than a nested key may have.
    """

    value: Any
    row: _Row
    is_mutable: bool
    may_have_objects: bool
    num_parts: int


class StaticMemo(NamedTuple):
    """What the `Static`s that one walk makes know of the objects in them, many of which may hold the same large one.

    Attributes:
        rows: id → the object, kept alive here, and its row.
        copies: see `copy_of`.
        classes: id → the class that a value had when it was read that stays itself in its key, which keeps it alive.
    """

    rows: dict[int, _Known]
    copies: IdentityDict[Any]
    classes: dict[int, type]


def new_static_memo() -> StaticMemo:
    """For a new walk, in which no object changes."""
    return StaticMemo({}, IdentityDict(), {})


class _Several:
    """Stands for the class of a value that was of more than one while it was read."""


def note_class(known: StaticMemo, value: Any, cls: type) -> None:
    """Notes of which class a value was when it was read, which its key keeps alive."""
    if known.classes.setdefault(id(value), cls) is not cls:  # alive in the key
        known.classes[id(value)] = _Several  # as above


class _Keys:
    """Makes the key of one value.

    Args:
        known: of the walk; needed if the key is not to be nested.
        is_nested: whether it is.

    Attributes:
        is_mutable: whether anything was met that can be mutated, and not only by those who never do.
        may_have_objects: Whether anything was met that `objects_with_identity` may list.
    """

    __slots__ = ("_is_nested", "_known", "_left", "is_mutable", "may_have_objects")

    def __init__(self, known: StaticMemo | None, is_nested: bool) -> None:
        self.is_mutable = False
        self.may_have_objects = False
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
            return content_of(value, self)
        if found is None:
            found = self._new_row(value)
        else:
            self._left -= found.num_parts
        self.is_mutable |= found.is_mutable
        self.may_have_objects |= found.may_have_objects
        return found.row

    def _new_row(self, value: Any) -> _Known:
        assert self._known is not None
        before, left = (self.is_mutable, self.may_have_objects), self._left
        self.is_mutable = self.may_have_objects = False
        row = _Row(content_of(value, self))
        row = _rows.intern(hash(row), row)
        num_parts = min(left - self._left, _MAX_NESTED + 1)
        made = _Known(value, row, self.is_mutable, self.may_have_objects, num_parts)
        self._known.rows[id(value)] = made  # alive in the entry
        self.is_mutable |= before[0]
        self.may_have_objects |= before[1]
        return made

    def note_class(self, value: Any, cls: type) -> None:
        """Notes of which class a value is that stays itself in its key."""
        if self._known is not None:
            note_class(self._known, value, cls)

    def of_all(self, values: Collection[Any]) -> tuple[Any, ...]:
        """What stands for several parts."""
        self._left -= len(values)
        if self._is_nested and self._left < 0:
            raise _TooManyPartsError
        return tuple([self.of(value) for value in values])


def key_of(value: Any, known: StaticMemo | None = None) -> tuple[Any, bool, bool]:
    """Makes the key of a value.

    Returns:
        The key; whether anything in the value can be mutated, and not only by those who never do; and whether
        `objects_with_identity` may list anything in it.

    Raises:
        Incomparable: if the value, or something in it, has no usable `==`.
    """
    keys = _Keys(known, is_nested=True)
    try:
        return keys.of(value), keys.is_mutable, keys.may_have_objects
    except _TooManyPartsError:
        keys = _Keys(new_static_memo() if known is None else known, is_nested=False)
        return keys.of(value), keys.is_mutable, keys.may_have_objects


class Static:
    """A value that is compared strictly and cannot be changed from outside.

    Two are equal if their values have the same type and content.

    Args:
        value: Anything that has `==`; it need not be hashable.
        known: What other `Static`s of the same walk found out about the objects in it.
        is_exact: Whether this stands for this very value, as in a tree that is taken apart only to be put together
            again: it then has the user's own objects, and no copy. The content that is compared is that of now.

    Attributes:
        objects: Of an exact one, the objects in the value of which an equal one is not as good, each in a `Same`.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.

    Cost: one walk over the containers in `value`, and a copy of those that can be mutated.
    """

    __slots__ = ("_hash", "_is_mutable", "_key", "_may_have_objects", "_value", "objects")

    def __init__(self, value: Any, known: StaticMemo | None = None, *, is_exact: bool = False) -> None:
        self._key, self._is_mutable, self._may_have_objects = key_of(value, known)
        self._value = value
        self.objects: tuple[IdentityKey, ...] = ()
        if is_exact and self._may_have_objects:
            objects = objects_with_identity(value)
            self.objects = tuple([IdentityKey(obj) for obj in objects])
            if known is not None:
                for obj in objects:
                    note_class(known, obj, type(obj))
        elif self._is_mutable and not is_exact:
            known = new_static_memo() if known is None else known
            self._value = copy_of(value, known.copies)
            # Another thread may have changed the value before it was copied, and only the copy stays what it is.
            self._key = key_of(self._value, known)[0]
        self._hash = hash(self._key)

    def thaw(self) -> Any:
        """The value for a tree that is put together: itself if it is immutable or exact, else a new copy."""
        return self.copied(IdentityDict()) if self.is_copied else self._value

    def copied(self, memo: IdentityDict[Any]) -> Any:
        """A copy that the caller owns of whatever can be mutated in the value. See `copy_of`."""
        return copy_of(self._value, memo) if self._is_mutable else self._value

    def with_copy(self, memo: IdentityDict[Any]) -> "Static":
        """The same with such a copy in the place of the value."""
        made = object.__new__(Static)
        made._key, made._hash = self._key, self._hash
        made._is_mutable, made._may_have_objects = self._is_mutable, self._may_have_objects
        made._value, made.objects = self.copied(memo), self.objects
        return made

    @property
    def has_objects(self) -> bool:
        """Whether there are objects in the value of which an equal one is not as good."""
        return self._may_have_objects and bool(objects_with_identity(self._value))

    @property
    def is_copied(self) -> bool:
        """Whether each tree that is put together has a copy of its own."""
        return self._is_mutable and not self.objects

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


def with_originals(value: Any, given_copies: IdentityDict[Any]) -> Any:
    """Puts the original in the place of each copy in a value, unless the copy was changed meanwhile.

    Args:
        value: A static value. Containers are entered, and made anew if they hold a copy.
        given_copies: Copy → original.
    """
    done: IdentityDict[Any] = IdentityDict()

    def replaced(part: Any) -> Any:
        if part in done:
            return done[part]
        original = given_copies.get(part, part)
        if original is not part:
            found = original if Static(original) == Static(part) else part
        else:
            found = with_new_parts(part, replaced)
        done[part] = found
        return found

    return replaced(value)


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
