"""Operands packed in another way, so that what goes in can be like what comes out (`_joining`).

Ties that only one side has are cut, and static numbers that change are traced leaves:

    goes in           comes out         is lowered to
    State(z, z)       State(a, b)       State(·, ·), with z and z
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·), with w and 0
"""

from collections.abc import Sequence
from typing import NamedTuple

from .._graph import Tags
from .._packed import Packed
from .._structure import LEAF, Op, canonical
from .._untying import is_noted
from ._crossed import Graph
from ._joining import Joined, Name
from ._packing import modules_of, tags_of


class Lowering(NamedTuple):
    """How operands are to be packed instead, so that what goes in is like what comes out.

    It names no structure, so that whoever remembers it keeps none alive.

    Attributes:
        origins: for each new record, the old one.
        children: those of each new record.
        promoted: the old records that become traced leaves.
        roots: of each packed module, in order.
        noted: the new records whose leaves came out untied on purpose.
    """

    origins: Sequence[int]
    children: Sequence[tuple[int, ...]]
    promoted: frozenset[int]
    roots: Sequence[int]
    noted: frozenset[int]


def lowering(operands: Graph, before: Graph, after: Graph, found: Joined) -> Lowering:
    """The operands with the ties that both sides have, and their static numbers that change traced.

    Args:
        operands: all of them; the modules of `before` come first.
        before: what goes in.
        after: what comes out.
        found: how they compare.
    """
    first: dict[int, int] = {}
    for i, j in found.met:
        first.setdefault(i, j)
    records = operands.records
    start = (len(records), -1)
    joint = list(zip(before.roots, after.roots, strict=True))
    alone = [(root, first.get(root, -1)) for root in operands.roots[len(joint) :]]

    def expand(name: Name) -> tuple[Op, Sequence[Name]]:
        i, j = name
        if name == start:
            return LEAF, [*joint, *alone]
        children = records[i][1]
        if j < 0:
            return LEAF, [(child, first.get(child, -1)) for child in children]
        return LEAF, list(zip(children, after.records[j][1], strict=True))

    table, numbers = canonical(start, expand)
    names = list(numbers)[:-1]
    return Lowering(
        [i for i, _ in names],
        [below for _, below in table[:-1]],
        found.promoted,
        [numbers[root] for root in (*joint, *alone)],
        frozenset(n for n, (_, j) in enumerate(names) if j in after.leaves and is_noted(after.leaves[j])),
    )


def lowered(operands: Graph, how: Lowering) -> tuple[list[Packed], Tags]:
    """Packed modules as a lowering has them, and what their records stand for.

    Args:
        operands: as they were.
        how: the lowering.
    """
    records, objects = operands.records, operands.objects
    ops = [LEAF if i in how.promoted else records[i][0] for i in how.origins]
    of_records = [objects[i] for i in how.origins]
    packed = modules_of(list(zip(ops, how.children, strict=True)), how.roots, of_records)
    return packed, tags_of(of_records)
