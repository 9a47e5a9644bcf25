"""Control flow in place: what an iteration or a branch changed is written back into the caller's objects at the end.

How often a loop runs, and which branch, is not known when they are traced. So each object that holds traced leaves
comes back in its place; then the objects at the end are the caller's, with other content. A function may swap two
objects and swap them back. If an iteration moved or replaced one, the next would do so again, and nobody could tell
which is where. An immutable model can be replaced as a whole, as ever.

    def body(counter, x):                 def body(pair, x):
        counter.n += x                        pair.a, pair.b = pair.b, pair.a
        return counter, x                     return pair, x
    n is written back                     an error
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jax import tree_util as jtu

from .._errors import SharingMismatchError
from .._packed import Packed
from .._structure import LEAF, Given, Node, Op, Record, Update, edges, intern
from ._crossed import Graph
from ._joining import Joined, holding_leaves
from ._passing_through import Unchanged


class Kept(NamedTuple):
    """Which objects of a carry came back in their places, by their numbers.

    Attributes:
        given: they and their leaves are what they were.
        updated: the content of these has changed.
    """

    given: frozenset[int] = frozenset()
    updated: frozenset[int] = frozenset()


def kept_objects(received: Graph, before: Graph, objects: Sequence[Any], after: Graph, found: Joined) -> Kept:
    """Finds the objects that came back in their places.

    Args:
        received: what the function received.
        before: the carry, or the operands, among that.
        objects: what has become of them, by the records of `after`.
        after: the same, packed.
        found: how the two compare.

    Raises:
        SharingMismatchError: if an object that holds traced leaves was moved, replaced within one that came back, or
            changed and not returned.
    """
    records, unchanged = before.shape.records, Unchanged(received)
    holds_leaf = holding_leaves(records)
    kept: set[int] = set()
    replaced: set[int] = set()
    for i, j in found.met:
        op = records[i][0]
        if type(op) is Node and op.type.carries_identity and i < len(received.objects):
            if objects[j] is received.objects[i]:
                kept.add(i)
                continue
            if not holds_leaf[i]:
                continue
            if unchanged.number_of(objects[j]) is not None:
                _raise_not_in_place(before, i, "another object that the function received was put there")
            replaced.add(i)
    for i, j in found.met:
        inside = zip(records[i][1], after.shape.records[j][1], strict=True) if i in kept else ()
        for child, _ in inside:
            if child in replaced:
                _raise_not_in_place(before, child, "a new object was put there")
    for i in replaced - kept:
        if not unchanged.is_itself(i):
            _raise_not_in_place(before, i, "it was changed, and another object was returned in its place")
    given = {n for i in kept if unchanged.is_unchanged(i) for _, n in unchanged.identities_below(i)}
    return Kept(frozenset(given), frozenset(kept - given))


def with_kept(packed: Packed, kept: Kept, noted: Collection[int], numbers: Mapping[int, int] | None = None) -> Packed:
    """A packed module in which the objects that came back in their places are named as the caller's.

    Args:
        packed: as it came out.
        kept: which objects these are.
        noted: the records whose leaves were untied on purpose.
        numbers: record → the object's number on the caller's side, if they are not the same.
    """
    if not (kept.given or kept.updated or noted):
        return packed
    structure = packed.structure
    each = iter(packed.leaves)
    leaves: list[Any] = []
    places: list[int] = []
    records: list[Record] = []
    for record, (op, children) in enumerate(structure.records, structure.base):
        leaf = next(each) if op is LEAF else None
        number = record if numbers is None else numbers.get(record)
        new: Op = op
        if number in kept.given:
            new, children = Given(number), ()
        elif number in kept.updated and type(op) is Node:
            new = Update(number, op)
        if new is LEAF:
            if record in noted:
                places.append(len(leaves))
            leaves.append(leaf)
        records.append((new, children))
    return Packed(leaves, intern(tuple(records), structure.root, structure.base, noted=tuple(places)))


def _raise_not_in_place(before: Graph, number: int, why: str) -> NoReturn:
    shape = before.shape
    path = next(path for found, path in edges(shape.records, [((), shape.root)]) if found == number)
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"`{text}` did not come back in its place: {why}.\n"
        "A loop changes in the next iteration again what it changes in place, and which branch is taken is not known "
        "when it is traced. So each object that holds traced leaves stays where it is. Change what is in it:\n"
        "    layer.weight = new                 # not: model.layer = Layer(new)\n"
        "or return a new model, without `in_place=True`.",
        (text,),
    )
