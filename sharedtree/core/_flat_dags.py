"""A flat DAG: the records, objects and cached paths of a tree that was packed.

Pair(w, [w])        records  0: leaf   1: list(0)   2: Pair(0, 1)       root 2
                    objects  w         [w]          Pair(...)           first paths  .a   .b   (none)
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import tree_util as jtu

from ._call_arguments import LeafPath
from ._structure import LEAF, Node, Path, Record, Structure, Update, canonical, edges, intern, reached_outside


class FlatDag:
    """The records of a packed tree, and the objects that they stand for.

    Everything else is computed on first use and cached. Nothing is copied: parts share the records and objects.

    Args:
        records: the table, children before parents.
        root: the number of the record that is the whole tree.
        objects: number → object. Those that nobody will ask for may be missing.
    """

    def __init__(
        self,
        records: Sequence[Record],
        root: int,
        objects: Sequence[Any] | Mapping[int, Any] = (),
    ) -> None:
        self.records = records
        self.root = root
        self.objects: Any = objects

    @classmethod
    def of(cls, structure: Structure, objects: Sequence[Any] | Mapping[int, Any] = ()) -> "FlatDag":
        """Wraps a structure and the objects of its tree. The structure is not interned again."""
        walked = cls(structure.records, structure.root, objects)
        walked.structure = structure
        return walked

    @classmethod
    def without_objects(cls, structure: Structure) -> "FlatDag":
        """Wraps a structure whose objects are unknown: each object is None."""
        return cls.of(structure, [None] * len(structure.records))

    @classmethod
    def of_leaves(cls, structure: Structure, leaves: Sequence[Any]) -> "FlatDag":
        """Wraps a structure and its traced leaves. The objects of nodes are missing."""
        return cls.of(structure, dict(zip(structure.leaf_numbers, leaves, strict=True)))

    def below(self, root: int) -> "FlatDag":
        """The part whose root is another record. Numbers stay the same."""
        return FlatDag(self.records, root, self.objects)

    def child(self, position: int) -> "FlatDag":
        """The part below one child of the root."""
        return self.below(self.records[self.root][1][position])

    def edges(self, path: Path = ()) -> Iterator[tuple[int, Path]]:
        """Yields each edge once, as the number it leads to and a path that ends with it; first paths come first.

        Args:
            path: a path to put before all of them.
        """
        return edges(self.records, [(path, self.root)], keys_of=self._keys_of)

    def _keys_of(self, number: int, node: Node) -> Path:
        """Keys of a node's children, from the object where that is possible.

        The record has keys, too, but they are those of the first tree with this structure: equal auxiliary data need
        not mean equal keys, since a class may take them from anywhere. So they serve only if the object is missing, or
        if a function has changed its class or the number of its children since.
        """
        if not self._has_object(number):
            return node.keys
        obj = self.objects[number]
        if type(obj) is not node.type.cls:
            return node.keys
        try:
            keys = node.type.keys_of(obj)
        except Exception:  # noqa: BLE001 -- a function may have left the object in any state
            return node.keys
        return keys if len(keys) == len(node.keys) else node.keys

    def _has_object(self, number: int) -> bool:
        objects = self.objects
        return number in objects if isinstance(objects, Mapping) else number < len(objects)

    @functools.cached_property
    def structure(self) -> Structure:
        """The interned structure."""
        return intern(tuple(self.records), self.root)

    @functools.cached_property
    def leaf_numbers(self) -> list[int]:
        """Numbers of the traced leaves, in order. Those of a part include leaves outside of it."""
        return [number for number, (op, _) in enumerate(self.records) if op is LEAF]

    @functools.cached_property
    def reached(self) -> set[int]:
        """Numbers of the records below the root, and the root. In a part, these are not all."""
        return set(canonical(self.root, lambda number: self.records[number])[1])

    @functools.cached_property
    def leaves(self) -> dict[int, Any]:
        """Number → traced leaf."""
        return {number: self.objects[number] for number in self.leaf_numbers}

    @functools.cached_property
    def first_paths(self) -> dict[int, Path]:
        """Number → representative path, for each record below the root."""
        first_paths: dict[int, Path] = {}
        for number, path in self.edges():
            first_paths.setdefault(number, path)
        return first_paths

    @functools.cached_property
    def all_paths(self) -> dict[int, list[str]]:
        """Number → its paths as errors print them, one for each edge, through the first path of the parent.

        Not all paths, since there may be exponentially many.
        """
        all_paths: dict[int, list[str]] = {}
        for number, path in self.edges():
            all_paths.setdefault(number, []).append(jtu.keystr(path))
        return all_paths

    @functools.cached_property
    def holds_leaf(self) -> list[bool]:
        """Number → whether the record is a traced leaf or has one below it."""
        holds_leaf: list[bool] = []
        # Children come before their parents, so their answers are there.
        for op, children in self.records:
            holds_leaf.append(op is LEAF or any(holds_leaf[child] for child in children))
        return holds_leaf

    @functools.cached_property
    def outside(self) -> dict[int, int]:
        """Number → how many paths lead to the record through plain containers alone: 1, or 2 for more. Others lack."""
        return reached_outside(self.records, self.root)

    def is_object(self, number: int, *, containers: bool = False) -> bool:
        """Tells whether a record stands for a node that carries identity.

        Args:
            number: the number of the record.
            containers: whether mutable containers outside modules do.
        """
        node = self.node(number)
        if node is None or not node.type.carries_identity:
            return False
        return not node.type.is_plain or containers or number not in self.outside

    def text(self, number: int) -> str:
        """The representative path of a record, as errors print it."""
        return jtu.keystr(self.first_paths[number])

    def node(self, number: int) -> Node | None:
        """The node of a record, also if its content is written into an object of the caller. None for leaves."""
        op = self.records[number][0]
        node = op.node if type(op) is Update else op
        return node if type(node) is Node else None

    def paths_to(self, chosen: Callable[[Any], bool]) -> list[str]:
        """Representative paths of the leaves for which `chosen` returns true."""
        return [self.text(number) for number, leaf in self.leaves.items() if chosen(leaf)]


def leaf_paths(structure: Structure) -> list[str]:
    """Representative path of each traced leaf of a structure, in order. Cached as long as the structure lives.

    A leaf that only an earlier tree of the same `Context` leads to has no path here, and its number in place of one.
    """
    # JAX asks several times in each trace, and again in the next.
    cached = _paths.get(structure)
    if cached is not None:
        return cached
    first_paths: dict[int, str] = {}
    leaf_numbers = set(structure.leaf_numbers)
    for number, path in edges(structure.records, [((), structure.root)]):
        if number in leaf_numbers and number not in first_paths:
            first_paths[number] = jtu.keystr(path)
    paths = [first_paths.get(number, f"<leaf {number}>") for number in structure.leaf_numbers]
    return _paths.setdefault(structure, paths)


_paths: weakref.WeakKeyDictionary[Structure, list[str]] = weakref.WeakKeyDictionary()


def with_paths(leaves: Sequence[Any], paths: Sequence[str]) -> list[tuple[LeafPath, Any]]:
    """Pairs leaves with their paths as key entries, as JAX wants them from a flatten function with keys."""
    return list(zip(map(LeafPath, paths), leaves, strict=True))
