"""The children of nodes, how deep they may be nested, and how often they may be walked.

Python and JAX walk some things with recursion in C, and hash a DAG in a time that grows with its number of paths. A
file could make them crash or run for ever, so there are bounds, for what is written as for what is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ._kinds import DEEP, MAX_COLLIDING, MAX_COLLISIONS, MAX_HASHED, MAX_NESTED, NODE_KINDS, WALKED, Operand

Child = int | str | bool | list[str] | None
"""The index of an earlier node, or an atom."""


def nested_too_deeply(nodes: Sequence[list[Any]]) -> int | None:
    """The first node that breaks the last rule of the grammar, if one does."""
    is_hashed = any(type(child) is int for node in nodes if node[0] in WALKED for child in walked_of(node))
    if not is_hashed and sum(node[0] not in DEEP for node in nodes) <= MAX_NESTED:
        return None
    depths, shallow, sizes = [0] * len(nodes), [0] * len(nodes), [0] * len(nodes)
    own = [1 + sum([_weight(child) for child in children_of(node)]) for node in nodes]
    most = MAX_HASHED + sum(own)
    hashed = 0
    for i, node in enumerate(nodes):
        below = [child for child in children_of(node) if type(child) is int]
        depths[i] = 1 + max([depths[child] for child in below], default=0)
        shallow[i] = (node[0] not in DEEP) + max([shallow[child] for child in below], default=0)
        sizes[i] = min(own[i] + sum([sizes[child] for child in below]), most + 1)
        walked = [child for child in walked_of(node) if type(child) is int]
        hashed += sum([sizes[child] for child in walked])
        if shallow[i] > MAX_NESTED or hashed > most or any(depths[child] > MAX_NESTED for child in walked):
            return i
    return None


def _weight(child: Child) -> int:
    """What an atom adds to the time of hashing; long numbers are hashed anew each time."""
    if type(child) is list:
        return 1 + sum(map(len, child)) // 16
    return type(child) is not int


def walked_of(node: list[Any]) -> Iterator[Child]:
    """The children of a node that Python, JAX or an unflatten function hashes or walks."""
    for place in WALKED.get(node[0], ()):
        if NODE_KINDS[node[0]][place - 1] == "children":
            yield from node[place]
        else:
            yield node[place]


class Collisions:
    """Counts the keys of dicts and the members of sets, and how many pairs of them have one hash.

    A key is compared with all of its hash that were there before it. Hashes of numbers are no secret, so that a file
    could be made of such keys.

    Args:
        most: how many pairs there may be. Default: any number, until somebody asks `are_too_many`.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._keys = self._pairs = 0

    def add(self, keys: Sequence[Any]) -> None:
        """Counts the keys of one dict or the members of one set.

        Raises:
            ValueError: if more than `MAX_COLLIDING` of them have one hash, or there are too many pairs by now.
        """
        hashes = list(map(hash, keys))
        self._keys += len(hashes)
        if len(set(hashes)) == len(hashes):
            return
        counts = Counter(hashes).values()
        if max(counts) > MAX_COLLIDING:
            raise ValueError(f"more than {MAX_COLLIDING} keys have one hash")
        self._pairs += sum([count * (count - 1) // 2 for count in counts])
        if self._most is not None and self._pairs > self._most:
            raise ValueError("in all of the file, too many keys have one hash")

    def are_too_many(self) -> bool:
        """Whether no reader would take as many pairs for so many keys."""
        return self._pairs > MAX_COLLISIONS + self._keys


def most_collisions(nodes: Sequence[list[Any]]) -> int:
    """How many pairs of keys of one hash a file of these nodes may have."""
    return MAX_COLLISIONS + sum([len(node[_KEYED[node[0]]]) for node in nodes if node[0] in _KEYED])


_KEYED = {"set": 1, "frozenset": 1, "dict": 1, "OrderedDict": 1, "defaultdict": 2}


def operands(node: list[Any]) -> Iterator[tuple[Operand, Any]]:
    """The operands of a node, each with what it is."""
    return zip(NODE_KINDS[node[0]], node[1:], strict=True)


def children_of(node: list[Any]) -> Iterator[Child]:
    """The children of a node, from left to right."""
    for operand, value in operands(node):
        if operand == "child":
            yield value
        elif operand == "children":
            yield from value
