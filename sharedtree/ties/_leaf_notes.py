"""Weak notes about leaves: what was tied outside modules, what is the whole gradient of a tie, what was meant untied.

The notes belong to the objects, not to paths, and keep none of them alive. What makes new leaves of noted ones hands
the notes on: `st.tree.map` does, and a transform, whose structures and results say which of their leaves are noted, so
that those of a cached call are noted, too. Vanilla functions hand nothing on.

*Tied outside modules.* There arrays are values: from `{"embed": w, "head": w}` the function under a transform gets two.
That is as it should be where they alias by accident, and a loss where `tie` made them one. So `tie` notes what it tied
outside modules, and a transform that meets one twice says so. Likewise an outer transform, to which lists and dicts are
objects, notes what it made one (`note_one_around`), for an inner one to which they are not. That ends with the trace: a
result says nothing of it. What a structure remembers (`Structure.tied_values`), JAX's caches keep: of calls that share
a trace, the one that was traced decides.

*Whole gradients.* A rule of `custom_vjp` that is right for an untied model may return one array at two paths, for each
its share: `return (Two(g, g),)`. What differentiation makes of a tie is one array at two paths as well, and is the sum
of the shares. Only who made it can tell. So while a rule runs, what makes such arrays leaves word of them: gradients,
pullbacks and `retie`.

*Gradients.* While a function is traced, the leaves of gradients that are made in it are noted, for a gradient looks
like a new model.

*Untied on purpose.* `untie` notes the leaves that it parts (`Structure.noted`): a lost tie was meant if both of its
parts are noted. A tie whose loss has been reported is noted in the same way, so that it is not reported twice. After
`jax.tree.map` it is to be said again.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core._by_identity import IdentitySet
from ..core._locks import Lock
from ..core._structure import LEAF, FlatDag, Structure, at_several_paths

_FEW = 1_000


class _Notes:
    """A set of objects by identity, which keeps none of them alive. All threads share it.

    What allows no weak reference (a Python number, a `jax.ShapeDtypeStruct`) is not noted. The entries of dead objects
    are swept out when there are twice as many as after the last time, or the oldest is dead, so that a note costs no
    callback.
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
                self._sweep()

    def hand_on(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        if self:
            self.add([made for leaf, made in zip(old, new, strict=True) if leaf in self])

    def places(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        return tuple([i for i, leaf in enumerate(leaves) if leaf in self]) if self else ()

    def __contains__(self, obj: object) -> bool:
        reference = self._references.get(id(obj))  # compared with the object itself
        return reference is not None and reference() is obj

    def __bool__(self) -> bool:
        """Whether one of them lives. The oldest says so, as a rule: those that are dead are asked once."""
        if not self._references:
            return False
        with self._lock:
            oldest = next(iter(self._references.values()), None)
            if oldest is not None and oldest() is None:
                self._sweep()
            return bool(self._references)

    def _sweep(self) -> None:
        alive = [(number, ref) for number, ref in list(self._references.items()) if ref() is not None]
        self._references = dict(alive)
        self._most = 2 * len(alive) + _FEW


_tied_outside, _one_around, _untied, _gradients = _Notes(), _Notes(), _Notes(), _Notes()

_structures: "weakref.WeakKeyDictionary[Structure, tuple[int, ...]]" = weakref.WeakKeyDictionary()
"""Which leaves of a structure were tied outside modules."""

_lock = Lock()  # for these


def hand_on(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Says of what was made of noted leaves, one by one, what was said of these. Costs nothing while nothing is."""
    for notes in (_tied_outside, _one_around, _untied):
        notes.hand_on(old, new)
    if _rules.stack:
        for before, leaf in zip(old, new, strict=True):
            if any(before in whole for whole in _rules.stack):
                _rules.stack[-1].add(leaf)


# --- tied outside modules ------------------------------------------------------------------------------------------


def is_tied_value(leaf: Any) -> bool:
    """Whether a leaf was tied outside modules."""
    return leaf in _tied_outside


def is_one_around(leaf: Any) -> bool:
    """Whether a transform around this one, to which lists and dicts are objects, made a leaf one."""
    return leaf in _one_around


def are_tied_values_known() -> bool:
    """Whether there are any."""
    return bool(_tied_outside or _one_around)


def which_are_tied_values(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The places of such leaves in a sequence."""
    return _tied_outside.places(leaves)


def note_tied_values(leaves: Iterable[Any]) -> None:
    """Says that these leaves were tied outside modules. What cannot be referred to weakly is left out."""
    _tied_outside.add(leaves)


def note_one_around(tree: FlatDag) -> None:
    """Notes the arrays that are at several places of containers which carry identity, for the transforms further in.

    Args:
        tree: what a function received, whose mutable containers carry identity outside modules.
    """
    below = {number for number, paths in tree.outside.items() if paths > 1}
    _one_around.add([tree.objects[number] for number in sorted(below) if tree.records[number][0] is LEAF])


def note_ties(tree: FlatDag, tied: Iterable[int]) -> None:
    """Notes the leaves of records that were made one, as far as they can be reached through plain containers alone.

    Args:
        tree: with its leaves.
        tied: the records that were made one with others.
    """
    below = {number for top in tied for number in tree.below(top).outside}
    note_tied_values(leaf for number, leaf in tree.leaves.items() if number in below and number in tree.outside)


def remember(structure: Structure, leaves: Sequence[Any]) -> None:
    """Remembers which leaves of a structure were noted."""
    places = _tied_outside.places(leaves)
    if places:
        with _lock:
            _structures[structure] = places


def recall(structure: Structure, leaves: Sequence[Any]) -> None:
    """Notes those of the leaves, with which a structure is put together, in whose places others were noted."""
    if _structures:
        with _lock:
            places = _structures.get(structure, ())
        note_tied_values(leaves[place] for place in places)


# --- whole gradients --------------------------------------------------------------------------------------------------


class _Rules(threading.local):
    def __init__(self) -> None:
        self.stack: list[IdentitySet] = []  # of each rule that runs, the arrays that were said to be whole


_rules = _Rules()  # a rule runs in one thread, and so does what it calls


@contextmanager
def noting_whole() -> Iterator[IdentitySet]:
    """Collects what is said inside the block, which calls a rule."""
    whole = IdentitySet()
    _rules.stack.append(whole)
    try:
        yield whole
    finally:
        _rules.stack.pop()


def note_tied(tree: FlatDag, leaves: Sequence[Any]) -> None:
    """Says it of the leaves of a gradient to which several paths lead, inside a rule."""
    if _rules.stack:
        several = at_several_paths(tree.records, [tree.root])
        for number, leaf in zip(tree.leaf_numbers, leaves, strict=True):
            if number in several:
                _rules.stack[-1].add(leaf)


# --- gradients --------------------------------------------------------------------------------------------------------


class _Traces(threading.local):
    def __init__(self) -> None:
        self.number = 0  # of those that are under way


_traces = _Traces()


@contextmanager
def noting_gradients() -> Iterator[None]:
    """Notes the gradients that are made inside the block."""
    _traces.number += 1
    try:
        yield
    finally:
        _traces.number -= 1


def note_gradient(leaves: Iterable[Any]) -> None:
    """Notes the leaves of a gradient, if anybody may ask."""
    if _traces.number:
        _gradients.add(leaf for leaf in leaves if leaf is not None)


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf was noted as one of a gradient."""
    return leaf in _gradients


# --- untied on purpose ------------------------------------------------------------------------------------------------


def note(leaves: Iterable[Any]) -> None:
    """Says of leaves that the ties between them were meant to go, or that their loss has been reported."""
    _untied.add(leaves)


def is_noted(leaf: Any) -> bool:
    """Whether a leaf was noted, or made of a noted one."""
    return leaf in _untied


def which_are_noted(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The places of the noted leaves in a sequence."""
    return _untied.places(leaves)
