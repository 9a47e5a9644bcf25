"""Identity: dictionaries and sets that compare objects by `is`, and a table that makes equal objects one.

    IdentityDict([(a, 1)])     `a in d` is True, `copy(a) in d` is False, and `a` lives as long as `d`
    WeakIdentityDict()         the same, but an entry goes when its object dies
    Interned()                 t.intern(hash(a), a) is t.intern(hash(b), b)      if `a.is_like(b)`

A plain dictionary from `id(obj)` to a value is wrong once the object dies, since another object may get its address.
These classes keep their objects alive or notice that one has died. Loops that run for every node of every call use a
plain dictionary all the same, and a comment there says who keeps the objects alive.

Interning is also known as hash consing (Ershov 1958). Interned objects are compared by `is`, in constant time.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, overload

from ._locks import Lock

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
        """Sets the value of an object, and has the entry removed when the object dies."""
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


# --- interning --------------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """Methods that `Interned` calls on its objects."""

    def complete(self) -> None:
        """Prepares the object for being added. No lock is held."""
        ...

    def is_like(self, candidate: Any, /) -> bool:
        """Returns True if this object can take the candidate's place."""
        ...


CandidateType = TypeVar("CandidateType", bound=Candidate)


class Interned(Generic[CandidateType]):
    """A table of interned objects, with one slot number for each of the objects of one hash.

    Comparing two objects may run a user's `==`. It may do anything, for example wait for another thread in `intern`.
    So the keys are integers, which compare without code of users, and objects are compared outside the lock. If another
    thread adds an object meanwhile, the search starts again.

    Attributes:
        alive: (hash, slot) → object.
        num_slots: hash → the number of slots in use at once so far. Only for hashes with more than one.
        num_added: The number of objects added so far. A search notices additions by it.
        lock: Held while an object is added.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[tuple[int, int], CandidateType] = weakref.WeakValueDictionary()
        self.num_slots: dict[int, int] = {}
        self.num_added = 0
        self.lock = Lock()

    def intern(self, hash_value: int, candidate: CandidateType) -> CandidateType:
        """Returns the equal object in the table; if there is none, adds the candidate and returns it.

        Args:
            hash_value: The hash of the candidate.
            candidate: The object to look for.

        Cost: one `is_like` for each living object with this hash, usually none or one.
        """
        while True:
            num_added = self.num_added
            # Search the slots of this hash, and remember the first one that is free.
            num_slots = self.num_slots.get(hash_value, 1)
            free_slot = num_slots
            for slot in range(num_slots):
                interned = self.alive.get((hash_value, slot))
                if interned is None:
                    free_slot = min(free_slot, slot)
                elif interned.is_like(candidate):
                    return interned
            candidate.complete()
            with self.lock:
                if self.num_added == num_added:
                    self.alive[hash_value, free_slot] = candidate
                    if free_slot == num_slots:
                        self.num_slots[hash_value] = num_slots + 1
                    # Counted last, since searches read the count first and without the lock: one that reads the new
                    # count sees the new object.
                    self.num_added += 1
                    return candidate
