"""The node that stands for a packed DAG in a vanilla pytree: its children are the unique leaves, its aux data the rest.

`Packed` is what JAX sees of each module that crosses a transform. `Dag`, for users, is the same with a face.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jax import tree_util as jtu

from ._arguments import LeafPath as LeafPath
from ._graph import unpack
from ._native_walk import native
from ._structure import LEAF, Given, Node, Structure, Update, edges


class Packed:
    """Unique traced leaves, and the structure that puts them together. Nothing checks that they fit."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Sequence[Any], structure: Structure) -> None:
        self.leaves = leaves
        self.structure = structure

    def __repr__(self) -> str:
        """As the module prints: JAX quotes what a function returned in its own errors."""
        is_whole = self.structure.base == 0 and all(type(op) not in (Given, Update) for op, _ in self.structure.records)
        if is_whole:
            return repr(unpack(self.structure, self.leaves))
        # A part of it may be in what was packed before, so that only its class and its own leaves are at hand.
        start = self.structure.root - self.structure.base
        op = self.structure.records[start][0] if start >= 0 else LEAF
        node = op.node if type(op) is Update else op
        return f"{node.type.cls.__name__ if type(node) is Node else '…'}({', '.join(map(str, self.leaves))})"


def leaf_paths(structure: Structure) -> list[str]:
    """The representative path of each traced leaf that `structure` itself defines, in order."""
    found: dict[int, str] = {}
    for number, path in edges(structure.records, [((), structure.root)], structure.base):
        found.setdefault(number, jtu.keystr(path))
    return [
        found.get(number, f"<leaf {number}>")
        for number, (op, _) in enumerate(structure.records, structure.base)
        if op is LEAF
    ]


def with_keys(leaves: Sequence[Any], structure: Structure) -> list[tuple[LeafPath, Any]]:
    """The leaves with their paths as keys."""
    keys = _keys.get(structure)
    if keys is None:
        # JAX asks several times in each trace, and again in the next.
        keys = _keys.setdefault(structure, [LeafPath(text) for text in leaf_paths(structure)])
    return list(zip(keys, leaves, strict=True))


_keys: weakref.WeakKeyDictionary[Structure, list[LeafPath]] = weakref.WeakKeyDictionary()


def _parts(packed: Packed) -> tuple[Sequence[Any], Structure]:
    return packed.leaves, packed.structure


def _packed(structure: Structure, leaves: Iterable[Any]) -> Packed:
    return Packed(tuple(leaves), structure)


if native is not None:
    native.learn_packed(Packed, Packed.leaves, Packed.structure)

jtu.register_pytree_with_keys(
    Packed,
    lambda packed: (with_keys(packed.leaves, packed.structure), packed.structure),
    _packed if native is None else native.packed_of,
    _parts if native is None else native.packed_parts,
)
