"""The children of nodes, and how deep they may be nested.

Python and JAX walk some things with recursion in C, and hash a DAG in a time that grows with its number of paths. A
file could make them crash or run for ever, so there are bounds, for what is written as for what is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ._kinds import DEEP, HASHED, MAX_COLLIDING, MAX_HASHED, MAX_NESTED, NODE_KINDS, Operand

Child = int | str | bool | list[str] | None
"""The index of an earlier node, or an atom."""


def nested_too_deeply(nodes: Sequence[list[Any]]) -> int | None:
    """The first node that breaks the last rule of the grammar, if one does."""
    is_hashed = any(type(child) is int for node in nodes for child in _walked_in_c(node))
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
        walked = [child for child in _walked_in_c(node) if type(child) is int]
        hashed += sum([sizes[child] for child in walked])
        if shallow[i] > MAX_NESTED or hashed > most or any(depths[child] > MAX_NESTED for child in walked):
            return i
    return None


def _weight(child: Child) -> int:
    """What an atom adds to the time of hashing; long numbers are hashed anew each time."""
    if type(child) is list:
        return 1 + sum(map(len, child)) // 16
    return type(child) is not int


def _walked_in_c(node: list[Any]) -> Sequence[Child]:
    if node[0] in HASHED:
        return node[HASHED[node[0]]]
    return node[1:3] if node[0] in ("treedef", "named_sharding") else ()


def require_few_collisions(keys: Sequence[Any]) -> None:
    """Raises if many keys have one hash: each would be compared with all of those before it.

    Hashes of numbers are no secret, so that a file could be made of such keys.

    Raises:
        ValueError: if more than `MAX_COLLIDING` have.
    """
    if len(keys) > MAX_COLLIDING and max(Counter(map(hash, keys)).values()) > MAX_COLLIDING:
        raise ValueError(f"more than {MAX_COLLIDING} keys have one hash")


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
