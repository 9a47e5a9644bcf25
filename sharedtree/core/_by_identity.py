"""Tables whose keys are objects, told apart by identity."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

ValueType = TypeVar("ValueType")
OtherType = TypeVar("OtherType")


class ByIdentity(Generic[ValueType]):
    """A dictionary with any objects for keys, equal only if they are one, in the order in which they were entered.

    It keeps its keys alive, so that no other object can get the address by which one is found.

    Args:
        entries: pairs of an object and its value.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Any, ValueType]] = ()) -> None:
        self._entries: dict[int, tuple[Any, ValueType]] = {id(entry[0]): entry for entry in entries}

    @classmethod
    def numbered(cls, objects: Iterable[Any]) -> "ByIdentity[int]":
        """Each object with its position, the last one of those that it has."""
        return ByIdentity((obj, number) for number, obj in enumerate(objects))

    def __getitem__(self, obj: Any) -> ValueType:
        return self._entries[id(obj)][1]

    def __setitem__(self, obj: Any, value: ValueType) -> None:
        self._entries[id(obj)] = obj, value

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._entries

    def __iter__(self) -> Iterator[Any]:
        return (obj for obj, _ in self._entries.values())

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

    def values(self) -> Iterator[ValueType]:
        """The values, in order."""
        return (value for _, value in self._entries.values())


class Objects(ByIdentity[None]):
    """A set of objects, equal only if they are one, which keeps them alive.

    Args:
        objects: those that are in it from the beginning.
    """

    __slots__ = ()

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        super().__init__((obj, None) for obj in objects)

    def add(self, obj: Any) -> bool:
        """Adds an object; whether it was not there."""
        before = len(self._entries)
        self._entries.setdefault(id(obj), (obj, None))
        return len(self._entries) > before
