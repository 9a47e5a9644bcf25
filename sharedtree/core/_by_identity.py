"""Dictionaries and sets of objects that are compared by identity.

A plain dictionary from `id(obj)` to a value is wrong once the object dies, since another object may get its address.
These classes keep their objects alive or notice that one has died. Loops that run for every node of every call use a
plain dictionary all the same, and a comment there says who keeps the objects alive.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

ValueType = TypeVar("ValueType")
OtherType = TypeVar("OtherType")


class IdentityDict(Generic[ValueType]):
    """A dictionary with objects as keys, compared by identity. It keeps them alive and in the order of insertion.

    Args:
        entries: Pairs of an object and its value.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Any, ValueType]] = ()) -> None:
        self._entries: dict[int, tuple[Any, ValueType]] = {id(obj): (obj, value) for obj, value in entries}

    def __getitem__(self, obj: Any) -> ValueType:
        _, value = self._entries[id(obj)]
        return value

    def __setitem__(self, obj: Any, value: ValueType) -> None:
        self._entries[id(obj)] = obj, value

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._entries

    def __iter__(self) -> Iterator[Any]:
        return (obj for obj, _ in self._entries.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.items())})"

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def get(self, obj: Any) -> ValueType | None: ...

    @overload
    def get(self, obj: Any, default: OtherType) -> ValueType | OtherType: ...

    def get(self, obj: Any, default: Any = None) -> Any:
        """Returns the value of an object, or the default."""
        entry = self._entries.get(id(obj))
        if entry is None:
            return default
        _, value = entry
        return value

    def setdefault(self, obj: Any, value: ValueType) -> ValueType:
        """Returns the value of an object, after setting it to the given one if the object had none."""
        _, kept_value = self._entries.setdefault(id(obj), (obj, value))
        return kept_value

    def forget_after(self, size: int) -> None:
        """Removes all entries but the first `size`."""
        while len(self._entries) > size:
            self._entries.popitem()

    def items(self) -> Iterable[tuple[Any, ValueType]]:
        """Returns the pairs of an object and its value."""
        return self._entries.values()

    def values(self) -> Iterable[ValueType]:
        """Returns the values."""
        return [value for _, value in self._entries.values()]


class IdentitySet:
    """A set of objects, compared by identity. It keeps them alive and in the order of insertion."""

    __slots__ = ("_objects",)

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._objects: dict[int, Any] = {id(obj): obj for obj in objects}

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._objects

    def __iter__(self) -> Iterator[Any]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, obj: Any) -> bool:
        """Adds an object. Returns False if it was there already."""
        if id(obj) in self._objects:
            return False
        self._objects[id(obj)] = obj
        return True


class WeakIdentityDict(Generic[ValueType]):
    """A dictionary like `IdentityDict`, with weak keys: an entry is removed when its object dies.

    If the stack is full at that moment, Python cannot run the removal. So a lookup also compares the object in the
    entry, and another object with the same address does not get the value.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], ValueType]] = {}

    def __setitem__(self, obj: Any, value: ValueType) -> None:
        # The closure must not hold `self`, which would then live as long as the object.
        address, entries = id(obj), self._entries

        def remove(reference: "weakref.ref[Any]") -> None:
            """Removes the entry, unless a new object with the same address has replaced it."""
            current_reference, _ = entries.get(address, (None, None))
            if current_reference is reference:
                entries.pop(address, None)

        entries[address] = weakref.ref(obj, remove), value

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, obj: Any) -> ValueType | None:
        """Returns the value of an object; None if it has none."""
        entry = self._entries.get(id(obj))
        if entry is None:
            return None
        reference, value = entry
        return value if reference() is obj else None
