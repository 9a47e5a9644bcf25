"""Objects of which equal ones are one, held weakly (hash consing, Ershov 1958)."""

import weakref
from typing import Any, Generic, Protocol, TypeVar

from ._locks import Lock


class Candidate(Protocol):
    """What can be interned."""

    def complete(self) -> None: ...

    def is_like(self, other: Any, /) -> bool: ...


CandidateType = TypeVar("CandidateType", bound=Candidate)


class Interned(Generic[CandidateType]):
    """Objects of which equal ones are one: those that are alive, by their hash, and a place among those with that hash.

    Comparing two of them may run a user's `==`, which may do anything, also wait for another thread that is interning.
    So the keys are integers, objects are compared outside the lock, and if meanwhile another was added, again.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[tuple[int, int], CandidateType] = weakref.WeakValueDictionary()
        self.places: dict[int, int] = {}  # of the hashes that several have had at once, how many
        self.num_added = 0
        self.lock = Lock()

    def intern(self, number: int, candidate: CandidateType) -> CandidateType:
        """The one that was there first of those that are equal to `candidate`, whose hash is `number`."""
        while True:
            num_added = self.num_added
            places = self.places.get(number, 1)
            free = places
            for place in range(places):
                known = self.alive.get((number, place))
                if known is None:
                    free = min(free, place)
                elif known.is_like(candidate):
                    return known
            candidate.complete()
            with self.lock:
                if self.num_added == num_added:
                    self.alive[number, free] = candidate
                    if free == places:
                        self.places[number] = places + 1
                    # Last, for others read it first, without the lock: who reads the new number sees what was added.
                    self.num_added += 1
                    return candidate
