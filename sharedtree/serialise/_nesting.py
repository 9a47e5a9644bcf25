"""The children of nodes, and how deep they may be nested.

Python and JAX walk some things with recursion in C, and hash a DAG in a time that grows with its number of paths. A
file could make them crash or run for ever, so there are bounds, for what is written as for what is read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ._kinds import DEEP, HASHED, MAX_HASHED, MAX_NESTED, NODE_KINDS, Operand

Child = int | str | bool | list[str] | None
"""The index of an earlier node, or an atom."""


def nested_too_deeply(nodes: Sequence[list[Any]]) -> int | None:
    """The first node that breaks the last rule of the grammar, if one does."""
    hashed = [child for node in nodes for child in _walked_in_c(node) if type(child) is int]
    if not hashed and sum(node[0] not in DEEP for node in nodes) <= MAX_NESTED:
        return None
    is_hashed = set(hashed)
    depths, shallow, sizes = [0] * len(nodes), [0] * len(nodes), [0] * len(nodes)
    for i, node in enumerate(nodes):
        below = [child for child in children_of(node) if type(child) is int]
        depths[i] = 1 + max([depths[child] for child in below], default=0)
        shallow[i] = (node[0] not in DEEP) + max([shallow[child] for child in below], default=0)
        sizes[i] = min(1 + sum([sizes[child] for child in below]), MAX_HASHED + 1)
        if shallow[i] > MAX_NESTED or (i in is_hashed and (depths[i] > MAX_NESTED or sizes[i] > MAX_HASHED)):
            return i
    return None


def _walked_in_c(node: list[Any]) -> Sequence[Child]:
    if node[0] in HASHED:
        return node[HASHED[node[0]]]
    return [node[1]] if node[0] == "treedef" else ()


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
