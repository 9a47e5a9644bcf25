"""Which ties were undone on purpose, so that their loss is not reported.

`untie` notes the leaves that it parts. The notes belong to these objects, not to paths: a lost tie was meant if both of
its parts are noted. What makes new leaves of noted ones hands the notes on: `st.tree.map` does, and a transform, whose
results say which of their leaves are noted (`Structure.noted`), so that those of a cached call are noted, too. A tie
whose loss has been reported is noted in the same way, so that it is not reported twice.

Vanilla functions hand nothing on: after `jax.tree.map` it is to be said again.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..core._locks import Lock
from . import _tied_values, _whole_gradients


class _Notes:
    """A set of objects by identity, which keeps none of them alive. All threads share it.

    What allows no weak reference (a Python number, a `jax.ShapeDtypeStruct`) is not noted. The entries of dead objects
    are swept out when there are twice as many as after the last time, so that a note costs no callback.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._most = _FEW
        self._lock = Lock()

    def add(self, objects: Iterable[Any]) -> None:
        with self._lock:
            for obj in objects:
                try:
                    self._references[id(obj)] = weakref.ref(obj)  # says whether the object with this id still lives
                except TypeError:
                    continue
            if len(self._references) > self._most:
                alive = [(number, ref) for number, ref in list(self._references.items()) if ref() is not None]
                self._references = dict(alive)
                self._most = 2 * len(alive) + _FEW

    def __contains__(self, obj: object) -> bool:
        reference = self._references.get(id(obj))  # compared with the object itself
        return reference is not None and reference() is obj

    def __bool__(self) -> bool:
        return bool(self._references)


_FEW = 1_000

_notes = _Notes()


def note(leaves: Iterable[Any]) -> None:
    """Says of leaves that the ties between them were meant to go, or that their loss has been reported."""
    _notes.add(leaves)


def is_noted(leaf: Any) -> bool:
    """Whether a leaf was noted, or made of a noted one."""
    return leaf in _notes


def hand_on(leaves: Sequence[Any], new: Sequence[Any]) -> None:
    """Notes what was made of noted leaves, one by one, in all places of notes. Costs nothing while nothing is."""
    _tied_values.hand_on(leaves, new)
    _whole_gradients.hand_on(leaves, new)
    if _notes:
        _notes.add([made for leaf, made in zip(leaves, new, strict=True) if leaf in _notes])


def which_are_noted(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The places of the noted leaves in a sequence."""
    return tuple([i for i, leaf in enumerate(leaves) if leaf in _notes]) if _notes else ()
