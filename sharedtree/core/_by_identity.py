"""Tables of objects that are told apart by identity. They see to it that an address stands for one object.

A plain dictionary from `id(obj)` to something goes wrong when the object dies, for the next one may get its address.
Loops that run for every node of every call use one all the same, and say what keeps their objects alive.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

ValueType = TypeVar("ValueType")
OtherType = TypeVar("OtherType")


class IdentityDict(Generic[ValueType]):
    """A dictionary with objects for keys, equal only if they are one, in the order in which they came, and kept alive.

    Args:
        entries: pairs of an object and its value.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Any, ValueType]] = ()) -> None:
        self._entries: dict[int, tuple[Any, ValueType]] = {id(entry[0]): entry for entry in entries}

    def __getitem__(self, obj: Any) -> ValueType:
        return self._entries[id(obj)][1]

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
        """The value of an object, or the default."""
        entry = self._entries.get(id(obj))
        return default if entry is None else entry[1]

    def setdefault(self, obj: Any, value: ValueType) -> ValueType:
        """The value of an object, which is this one if it had none."""
        return self._entries.setdefault(id(obj), (obj, value))[1]

    def forget_after(self, size: int) -> None:
        """Takes out the entries that came after the first `size`."""
        while len(self._entries) > size:
            self._entries.popitem()

    def items(self) -> Iterable[tuple[Any, ValueType]]:
        """Each object with its value."""
        return self._entries.values()

    def values(self) -> Iterable[ValueType]:
        """The values."""
        return [value for _, value in self._entries.values()]


class IdentitySet:
    """A set of objects, equal only if they are one, in the order in which they came, and kept alive."""

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
        """Adds an object; whether it was not there."""
        if id(obj) in self._objects:
            return False
        self._objects[id(obj)] = obj
        return True


class WeakIdentityDict(Generic[ValueType]):
    """The same, but keeps no object alive: an entry goes with its object.

    If the stack is full when an object dies, so that Python cannot take out the entry, another object with its address
    does not get what the entry has.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], ValueType]] = {}

    def __setitem__(self, obj: Any, value: ValueType) -> None:
        number, entries = id(obj), self._entries

        def forget(reference: "weakref.ref[Any]") -> None:
            if entries.get(number, (None,))[0] is reference:
                entries.pop(number, None)

        entries[number] = weakref.ref(obj, forget), value

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, obj: Any) -> ValueType | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(obj))
        return None if entry is None or entry[0]() is not obj else entry[1]
