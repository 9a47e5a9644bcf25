"""Which arrays were tied in plain containers, where a transform takes them for values.

Outside modules arrays are values: from `{"embed": w, "head": w}` the function under a transform gets two. That is as it
should be where they alias by accident, and a loss where `tie` made them one. So `tie` notes what it tied outside
modules, whoever makes a new tree of such leaves hands the note on, and a transform that meets one twice says so.

Likewise an outer transform, to which lists and dicts are objects, notes what it made one (`note_one_around`), for an
inner one to which they are not. That ends with the trace: a result says nothing of it.

Arrays are noted weakly. A structure remembers which leaves of it were noted when it was taken from a tree, for it is
put together again with others. So does that of a result (`Structure.tied_values`), which JAX's caches keep: of calls
that share a trace, the one that was traced decides.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..core._handle import Walked
from ..core._locks import Lock
from ..core._structure import LEAF, Record, Structure, reached_outside

_arrays: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_one_around: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_structures: "weakref.WeakKeyDictionary[Structure, tuple[int, ...]]" = weakref.WeakKeyDictionary()
_lock = Lock()


def is_tied_value(leaf: Any) -> bool:
    """Whether a leaf was tied outside modules."""
    return bool(_arrays) and _arrays.get(id(leaf)) is leaf  # the dictionary holds what is alive


def is_one_around(leaf: Any) -> bool:
    """Whether a transform around this one, to which lists and dicts are objects, made a leaf one."""
    return bool(_one_around) and _one_around.get(id(leaf)) is leaf  # as above


def are_tied_values_known() -> bool:
    """Whether there are any."""
    return bool(_arrays or _one_around)


def which_are_tied_values(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The places of such leaves in a sequence."""
    return tuple([i for i, leaf in enumerate(leaves) if is_tied_value(leaf)]) if _arrays else ()


def note_tied_values(leaves: Iterable[Any]) -> None:
    """Says that these leaves were tied outside modules. What cannot be referred to weakly is left out."""
    _note(_arrays, leaves)


def note_one_around(tree: Walked) -> None:
    """Notes the arrays that are at several places of containers which carry identity, for the transforms further in.

    Args:
        tree: what a function received, whose mutable containers carry identity outside modules.
    """
    outside = reached_outside(tree.records, tree.root)
    below = {number for number, paths in outside.items() if paths > 1}
    _note(_one_around, [tree.objects[number] for number in sorted(below) if tree.records[number][0] is LEAF])


def _note(noted: "weakref.WeakValueDictionary[int, Any]", leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        try:
            with _lock:
                noted[id(leaf)] = leaf  # the entry goes when the leaf does
        except TypeError:
            continue


def note_ties(records: Sequence[Record], tied: Iterable[int], leaves: Sequence[Any]) -> None:
    """Notes the leaves of records that were made one, as far as they can be reached through plain containers alone.

    Args:
        records: of the tree, whose root is the last one.
        tied: the records that were made one with others.
        leaves: of the tree, in the order of the records.
    """
    outside = reached_outside(records, len(records) - 1)
    below = {number for top in tied for number in reached_outside(records, top)}
    numbers = [number for number, (op, _) in enumerate(records) if op is LEAF]
    each = zip(numbers, leaves, strict=True)
    note_tied_values(leaf for number, leaf in each if number in below and number in outside)


def hand_on(old: Iterable[Any], new: Iterable[Any]) -> None:
    """Notes each new leaf whose old one was noted."""
    each = list(zip(old, new, strict=True)) if _arrays or _one_around else ()
    note_tied_values(leaf for before, leaf in each if is_tied_value(before))
    _note(_one_around, (leaf for before, leaf in each if is_one_around(before)))


def remember(structure: Structure, leaves: Sequence[Any]) -> None:
    """Remembers which leaves of a structure were noted."""
    if _arrays:
        places = which_are_tied_values(leaves)
        if places:
            with _lock:
                _structures[structure] = places


def recall(structure: Structure, leaves: Sequence[Any]) -> None:
    """Notes those of the leaves, with which a structure is put together, in whose places others were noted."""
    if _structures:
        with _lock:
            places = _structures.get(structure, ())
        note_tied_values(leaves[place] for place in places)
