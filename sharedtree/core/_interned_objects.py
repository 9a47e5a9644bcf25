"""Interning: equal objects become one object, held weakly (hash consing, Ershov 1958).

    table = Interned()
    table.intern(hash(a), a) is table.intern(hash(b), b)        if `a.is_like(b)`

Then `is` compares them, in constant time.
"""

import weakref
from typing import Any, Generic, Protocol, TypeVar

from ._locks import Lock


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
