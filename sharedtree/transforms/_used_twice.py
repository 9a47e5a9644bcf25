"""One model as two arguments of which one is differentiated: a target network right after a hard update.

    q, target = q, q
    sharedtree.grad(td)(q, target)      # as of two models: the gradient of what flows through `q`

Modules that are treated in two ways are an error. Here both are of one class and hold what they share at the same
paths, so that it is clear what is meant: what they share is cut as arrays are. What a third argument holds, too, or
what is at another path, is not.
"""

from collections import defaultdict
from collections.abc import Sequence

from .._sharing import Shape, matching
from .._structure import Node, Record, edges
from ._treatments import Fates


def used_twice(fates: Fates) -> set[int]:
    """The modules that are in one differentiated argument and in one that is not, at the same paths in both.

    Args:
        fates: of all arguments, under what they are differentiated with respect to.
    """
    graph = fates.graph
    records = graph.records
    # For each module in several arguments: the fates that it has in each of these.
    holders: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    several = fates.several()
    for place, root in enumerate(fates.ways):
        for way in fates.ways_from(root):
            op = records[way[0]][0]
            if way[0] in several and type(op) is Node and not op.type.is_plain:
                holders[way[0]][place].add(fates[way])
    by_pair: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for number, fates_in in holders.items():
        if len(fates_in) == 2 and all(len(each) == 1 for each in fates_in.values()):
            one, other = sorted(fates_in)
            by_pair[one, other].add(number)
    found: set[int] = set()
    for (one, other), numbers in by_pair.items():
        here, there = graph.modules[one], graph.modules[other]
        is_one_differentiated = (fates.prefixes[one] is False) != (fates.prefixes[other] is False)
        if is_one_differentiated and here.position != there.position and here.path == there.path:
            found |= numbers - _elsewhere(records, here.structure.root, there.structure.root)
    return found


def _elsewhere(records: Sequence[Record], one: int, other: int) -> set[int]:
    """What is in one of two modules, and not in the other at the same path."""
    ends: set[tuple[int, int]] = set()  # where the two part, or both end

    def agree(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    found: set[int] = set()
    for pair in matching(Shape(records, one), Shape(records, other), agree):
        both = pair.left, pair.right
        if pair.left != pair.right:
            found.update(both)
        if pair.left != pair.right and both in ends:
            found.update(number for number, _ in edges(records, [((), each) for each in both]))
    return found
