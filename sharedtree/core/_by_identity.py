"""Identity: dictionaries and sets that compare objects by `is`, and a table that makes equal objects one.

    d = IdentityDict([(a, 1)])    `a in d` is True, `copy(a) in d` is False, and `a` lives as long as `d`
    WeakIdentityDict()            the same, but an entry is removed when its object dies
    t = Interned()                t.intern(hash(a), a) is t.intern(hash(b), b)      if `a.is_like(b)`

A plain dictionary from `id(obj)` to a value is wrong once the object dies, since another object may get its address.
These classes keep their objects alive, or notice that one has died. Loops that run for every node of every call use a
plain dictionary from `id(obj)` all the same, which is faster. A comment there says who keeps the objects alive.

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
        entries: Pairs of an object and its value. If an object occurs twice, the later value counts.
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
        """Returns the value of an object; `default` if it is no key."""
        entry = self._entries.get(id(obj))
        if entry is None:
            return default
        _, value = entry
        return value

    def setdefault(self, obj: Any, value: ValueType) -> ValueType:
        """Returns the value of an object. If it is no key yet, it is entered with `value` before."""
        _, kept_value = self._entries.setdefault(id(obj), (obj, value))
        return kept_value

    def forget_after(self, size: int) -> None:
        """Removes all entries but the first `size` ones. Does nothing if there are no more."""
        while len(self._entries) > size:
            self._entries.popitem()

    def items(self) -> Iterable[tuple[Any, ValueType]]:
        """Returns pairs of an object and its value, in the order of insertion. A view, which changes with the dict."""
        return self._entries.values()

    def values(self) -> Iterable[ValueType]:
        """Returns a list of the values, in the order of insertion."""
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
        """Adds an object. Returns True if it is new, and False if it was there already."""
        if id(obj) in self._objects:
            return False
        self._objects[id(obj)] = obj
        return True


class WeakIdentityDict(Generic[ValueType]):
    """A dictionary like `IdentityDict`, with weak keys: an entry is removed when its object dies.

    Objects of some classes, such as `int` and `list`, cannot be keys: setting a value for one raises `TypeError`.

    If an object dies while the stack of calls is full, Python cannot run the removal, and the entry stays. Then a new
    object may get the same address. So a lookup also checks that the entry refers to the object that is looked up.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], ValueType]] = {}

    def __setitem__(self, obj: Any, value: ValueType) -> None:
        """Sets the value of an object, until the object dies.

        Raises:
            TypeError: If there can be no weak reference to the object.
        """
        # `remove` holds the entries and not `self`, so that `self` is in no reference cycle.
        address, entries = id(obj), self._entries

        def remove(reference: "weakref.ref[Any]") -> None:
            """Removes the entry, unless it was replaced: by a later value, or by a new object with the same address."""
            current_reference, _ = entries.get(address, (None, None))
            if current_reference is reference:
                entries.pop(address, None)

        entries[address] = weakref.ref(obj, remove), value

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, obj: Any) -> ValueType | None:
        """Returns the value of an object; None if the object is no key."""
        entry = self._entries.get(id(obj))
        if entry is None:
            return None
        reference, value = entry
        return value if reference() is obj else None


# --- interning --------------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """Object that may be added to an `Interned`. These are the methods that `Interned` calls."""

    def complete(self) -> None:
        """Computes what was not needed for the comparison, before the object is added. No lock is held.

        Called again if another thread has added an object meanwhile, and the search starts again.
        """
        ...

    def is_like(self, candidate: Any, /) -> bool:
        """Returns True if this object of the table can take the place of the candidate."""
        ...


CandidateType = TypeVar("CandidateType", bound=Candidate)


class Interned(Generic[CandidateType]):
    """A table in which no two objects are alike. It refers to them weakly.

        hash 7    slot 0: a    slot 1: b         two objects, not alike, but with the same hash
        hash 9    slot 0: c

    The key of an object is its hash and a slot number, counted from 0 for each hash. A slot becomes free when its
    object dies.

    Comparing two objects may run a user's `==`. It may do anything, for example wait for another thread that is in
    `intern`. So the keys of the table are integers, which compare without code of users, and objects are compared
    outside the lock. If another thread adds an object meanwhile, the search starts again.

    Attributes:
        alive: (hash, slot) → object.
        num_slots: hash → the largest number of slots in use at one time. Without an entry it is 1 or 0.
        num_added: The number of objects added so far. If it has changed during a search, another thread has added an
            object.
        lock: Held while an object is added, and not while objects are compared.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[tuple[int, int], CandidateType] = weakref.WeakValueDictionary()
        self.num_slots: dict[int, int] = {}
        self.num_added = 0
        self.lock = Lock()

    def intern(self, hash_value: int, candidate: CandidateType) -> CandidateType:
        """Returns the object in the table that is like the candidate. If there is none, adds and returns the candidate.

        Args:
            hash_value: The hash of the candidate. Objects that are alike must have the same hash.
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
            # Add it, unless another thread has added an object since the search began. Then search again.
            with self.lock:
                if self.num_added == num_added:
                    self.alive[hash_value, free_slot] = candidate
                    if free_slot == num_slots:
                        self.num_slots[hash_value] = num_slots + 1
                    # Counted last. A search reads the count first, and without the lock: if it reads the new count, the
                    # new object is in the table already.
                    self.num_added += 1
                    return candidate
