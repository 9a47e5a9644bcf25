"""Weak notes about leaves: tied outside modules, whole gradient of a tie, gradient, untied on purpose.

A *note* is a fact about a leaf, not visible in its value. To *note* a leaf is to put it into the set of all leaves with
this fact. The set does not keep its leaves alive. If functions of this package (`st.tree.map` and others,
transforms) make new leaves from noted ones, they note the new leaves as well. The structures and results of a transform
record which of their leaves are noted, so that a cached call notes its leaves, too. Vanilla functions do not.

    tied = st.tie({"a": v, "b": w}, ...)      v is noted as tied outside modules
    st.tree.map(jnp.negative, tied)           so is -v
    st.untie(tied)                            v and its copy are noted as untied on purpose

*Tied outside modules.* Outside modules arrays are values: from `{"embed": w, "head": w}` the function under a transform
gets two arrays. If they alias by accident, that is right. If `tie` made them one, the tie is lost. So `tie` notes the
arrays that it ties outside modules, and a transform warns if it finds such an array twice. In the same way a transform
with `Policy(containers=True)` notes the arrays that it made one (`note_one_around`), for inner transforms without that
policy. This second note ends with the trace, and results do not get it. A structure records its noted leaves
(`Structure.tied_values`), and JAX's caches keep the structure: if several calls share a trace, the notes of the call
that was traced count for all.

*Whole gradients.* A `custom_vjp` rule written for an untied model may return one array at two paths, as the share of
each: `return (Two(g, g),)`. Differentiating a tied model also gives one array at two paths, but that one is the sum of
the shares. The two cannot be told apart afterwards. So while a rule runs, gradients, pullbacks and `retie` note the
arrays that are such sums.

*Gradients.* While a function is traced, the leaves of gradients that are made in it are noted, because a gradient
looks like a new model.

*Untied on purpose.* `untie` notes the leaves that it separates (`Structure.noted`). The loss of a tie was intended if
both parts are noted. The parts of a tie whose loss has been reported are noted in the same way, so that the loss is not
reported twice. The results of `jax.tree.map` are not noted.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core._by_identity import IdentitySet
from ..core._locks import Lock
from ..core._structure import LEAF, FlatDag, Structure, records_at_several_paths

_MIN_SWEEP_SIZE = 1_000
"""Smallest number of entries at which dead ones are swept out."""


class _Notes:
    """A set of objects by identity, without keeping them alive. All threads share it.

    Objects without weak references (Python numbers, `jax.ShapeDtypeStruct`) are left out. Dead entries are not removed
    by callbacks, which would make each note slower. They are swept out when there are twice as many entries as after
    the last sweep, or when the oldest entry is found dead.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._sweep_size = _MIN_SWEEP_SIZE
        self._lock = Lock()

    def add(self, objects: Iterable[Any]) -> None:
        """Adds the objects. Objects that allow no weak references are left out."""
        with self._lock:
            for obj in objects:
                try:
                    # The reference tells whether the object with this id still lives.
                    self._references[id(obj)] = weakref.ref(obj)
                except TypeError:
                    continue
            if len(self._references) > self._sweep_size:
                self._sweep()

    def hand_on(self, old_leaves: Sequence[Any], new_leaves: Sequence[Any]) -> None:
        """Adds each new leaf whose old leaf, at the same index, is in the set."""
        # Costs next to nothing if the set is empty.
        if self:
            self.add([new for old, new in zip(old_leaves, new_leaves, strict=True) if old in self])

    def places(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """Returns the indices of the leaves in the set."""
        return tuple([i for i, leaf in enumerate(leaves) if leaf in self]) if self else ()

    def __contains__(self, obj: object) -> bool:
        # A dead object's id may belong to a new object by now, so the reference is compared with the object itself.
        reference = self._references.get(id(obj))
        return reference is not None and reference() is obj

    def __bool__(self) -> bool:
        """Returns True if the set has entries. Removes those of dead objects first, if the oldest object is dead."""
        if not self._references:
            return False
        with self._lock:
            oldest = next(iter(self._references.values()), None)
            if oldest is not None and oldest() is None:
                self._sweep()
            return bool(self._references)

    def _sweep(self) -> None:
        """Removes the entries of dead objects. The caller holds the lock."""
        # The items are copied, since another thread may look something up meanwhile.
        alive = [(number, ref) for number, ref in list(self._references.items()) if ref() is not None]
        self._references = dict(alive)
        self._sweep_size = 2 * len(alive) + _MIN_SWEEP_SIZE


_tied_outside, _one_around, _untied, _gradients = _Notes(), _Notes(), _Notes(), _Notes()

_structures: "weakref.WeakKeyDictionary[Structure, tuple[int, ...]]" = weakref.WeakKeyDictionary()
"""Structure → indices of its leaves that were tied outside modules."""

# Guards `_structures`. Each set of notes has its own lock.
_lock = Lock()


def hand_on(old_leaves: Sequence[Any], new_leaves: Sequence[Any]) -> None:
    """Copies the notes of leaves to the leaves that were made from them, except the note that a leaf is a gradient's.

    Costs next to nothing while no leaf is noted.

    Args:
        old_leaves: leaves, noted or not.
        new_leaves: one leaf for each of them, in the same order.
    """
    for notes in (_tied_outside, _one_around, _untied):
        notes.hand_on(old_leaves, new_leaves)
    if _rules.stack:
        for old_leaf, new_leaf in zip(old_leaves, new_leaves, strict=True):
            # While an inner rule runs, a whole gradient of the outer rule may be mapped. The new array is one for the
            # inner rule.
            if any(old_leaf in whole_gradients for whole_gradients in _rules.stack):
                _rules.stack[-1].add(new_leaf)


# --- tied outside modules ------------------------------------------------------------------------------------------


def is_tied_value(leaf: Any) -> bool:
    """Returns True if `tie` made a leaf one object outside modules, or if the leaf was made from such a leaf."""
    return leaf in _tied_outside


def is_one_around(leaf: Any) -> bool:
    """Returns True if an outer transform with `Policy(containers=True)` holds a leaf as one object at several paths."""
    return leaf in _one_around


def are_tied_values_known() -> bool:
    """Returns True if any living leaf is noted as tied outside modules or as one in an outer transform."""
    return bool(_tied_outside or _one_around)


def which_are_tied_values(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Returns the indices of the leaves noted as tied outside modules."""
    return _tied_outside.places(leaves)


def note_tied_values(leaves: Iterable[Any]) -> None:
    """Notes leaves as tied outside modules. Leaves without weak references, such as numbers, are left out."""
    _tied_outside.add(leaves)


def note_one_around(tree: FlatDag) -> None:
    """Notes the arrays that several paths through plain containers lead to, for inner transforms.

    Args:
        tree: the arguments of a function under `Policy(containers=True)`.
    """
    tied_numbers = {number for number, num_paths in tree.outside.items() if num_paths > 1}
    _one_around.add([tree.objects[number] for number in sorted(tied_numbers) if tree.records[number][0] is LEAF])


def note_ties(tree: FlatDag, tied: Iterable[int]) -> None:
    """Notes the leaves of tied records as tied outside modules, if plain containers alone lead to them.

    Args:
        tree: the tree, with its leaves.
        tied: numbers of the tied records.
    """
    # No module may stand between the tied record and the leaf, nor between the root and the leaf.
    tied_numbers = {number for top in tied for number in tree.below(top).outside}
    note_tied_values(leaf for number, leaf in tree.leaves.items() if number in tied_numbers and number in tree.outside)


def remember(structure: Structure, leaves: Sequence[Any]) -> None:
    """Records with a structure which of its leaves are noted as tied outside modules. `recall` uses it."""
    places = _tied_outside.places(leaves)
    if places:
        with _lock:
            _structures[structure] = places


def recall(structure: Structure, leaves: Sequence[Any]) -> None:
    """Notes new leaves of a structure as tied outside modules, if the old leaves in their places were noted.

    Args:
        structure: the structure, with which `remember` recorded the noted leaves.
        leaves: the new leaves, in the order of the old ones.
    """
    if _structures:
        with _lock:
            places = _structures.get(structure, ())
        note_tied_values(leaves[place] for place in places)


# --- whole gradients --------------------------------------------------------------------------------------------------


class _Rules(threading.local):
    """The `custom_vjp` rules that run in this thread.

    Attributes:
        stack: for each rule, the arrays noted as whole gradients. Rules nest, and the innermost is the last.
    """

    def __init__(self) -> None:
        self.stack: list[IdentitySet] = []


# Thread-local, since a rule and everything that it calls run in one thread.
_rules = _Rules()


@contextmanager
def noting_whole() -> Iterator[IdentitySet]:
    """Opens a block for the call of a `custom_vjp` rule. Yields the set of the whole gradients noted in it."""
    whole_gradients = IdentitySet()
    _rules.stack.append(whole_gradients)
    try:
        yield whole_gradients
    finally:
        _rules.stack.pop()


def note_tied(tree: FlatDag, leaves: Sequence[Any]) -> None:
    """Notes the tied leaves of a gradient as whole gradients, for the innermost rule. Does nothing outside rules.

    Args:
        tree: the records of the gradient.
        leaves: its leaves, in order.
    """
    if _rules.stack:
        tied_numbers = records_at_several_paths(tree.records, [tree.root])
        for number, leaf in zip(tree.leaf_numbers, leaves, strict=True):
            if number in tied_numbers:
                _rules.stack[-1].add(leaf)


# --- gradients --------------------------------------------------------------------------------------------------------


class _Traces(threading.local):
    """Traces that run in this thread.

    Attributes:
        count: number of open blocks of `noting_gradients`.
    """

    def __init__(self) -> None:
        self.count = 0


_traces = _Traces()


@contextmanager
def noting_gradients() -> Iterator[None]:
    """Opens a block in which `note_gradient` notes leaves. Outside such blocks it does nothing."""
    _traces.count += 1
    try:
        yield
    finally:
        _traces.count -= 1


def note_gradient(leaves: Iterable[Any]) -> None:
    """Notes the leaves of a gradient, inside a block of `noting_gradients` only. A leaf None is no gradient."""
    if _traces.count:
        _gradients.add(leaf for leaf in leaves if leaf is not None)


def is_gradient(leaf: Any) -> bool:
    """Returns True if a leaf was noted as part of a gradient."""
    return leaf in _gradients


# --- untied on purpose ------------------------------------------------------------------------------------------------


def note(leaves: Iterable[Any]) -> None:
    """Notes leaves whose ties were undone on purpose, or whose lost ties have been reported."""
    _untied.add(leaves)


def is_noted(leaf: Any) -> bool:
    """Returns True if a leaf was untied on purpose or reported, or was made from such a leaf."""
    return leaf in _untied


def which_are_noted(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Returns the indices of the leaves that were untied on purpose or reported."""
    return _untied.places(leaves)
