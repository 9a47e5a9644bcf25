"""A tree that was taken apart: what the other rooms ask of it, once said.

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


class Walked:
    """The records of a tree, the number of the whole, and what the records stand for.

    Args:
        records: the table, children before parents.
        root: the number of the record that is the whole tree.
        objects: number → object, where that is at hand.
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
    def of(cls, structure: Structure, objects: Sequence[Any] | Mapping[int, Any] = ()) -> "Walked":
        """That of a structure by itself."""
        made = cls(structure.records, structure.root, objects)
        made.structure = structure
        return made

    @classmethod
    def without_objects(cls, structure: Structure) -> "Walked":
        """That of a structure of which nothing is at hand: each object is None."""
        return cls.of(structure, [None] * len(structure.records))

    @classmethod
    def of_leaves(cls, structure: Structure, leaves: Sequence[Any]) -> "Walked":
        """That of a structure of which only the leaves are at hand."""
        return cls.of(structure, dict(zip(structure.leaf_numbers, leaves, strict=True)))

    def below(self, root: int) -> "Walked":
        """A part of it."""
        return Walked(self.records, root, self.objects)

    def edges(self, path: Path = ()) -> Iterator[tuple[int, Path]]:
        """Every way into every record, once each, the first paths first; `path` stands before them."""
        return edges(self.records, [(path, self.root)], keys_of=self._keys_of)

    def _keys_of(self, number: int, node: Node) -> Path:
        """The keys of a node's children, by the object if that is at hand.

        Equal auxiliary data need not mean equal keys (a class may take them from anywhere), and a structure that serves
        two trees has the keys of the first. So the keys in it stand in only for an object that is not at hand, or that
        has come to have another number of children since.
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

    def child(self, position: int) -> "Walked":
        """One child of the root, as a part of it."""
        return self.below(self.records[self.root][1][position])

    @functools.cached_property
    def structure(self) -> Structure:
        """The same, interned."""
        return intern(tuple(self.records), self.root)

    @functools.cached_property
    def leaf_numbers(self) -> list[int]:
        """The numbers of the traced leaves, in order."""
        return [number for number, (op, _) in enumerate(self.records) if op is LEAF]

    @functools.cached_property
    def reached(self) -> set[int]:
        """The numbers of what a path leads to: of a part, not all."""
        return set(canonical(self.root, lambda number: self.records[number])[1])

    @functools.cached_property
    def leaves(self) -> dict[int, Any]:
        """Number → traced leaf."""
        return {number: self.objects[number] for number in self.leaf_numbers}

    @functools.cached_property
    def first_paths(self) -> dict[int, Path]:
        """Number → the first path to it, of everything that a path leads to."""
        found: dict[int, Path] = {}
        for number, path in self.edges():
            found.setdefault(number, path)
        return found

    @functools.cached_property
    def all_paths(self) -> dict[int, list[str]]:
        """Number → the ways into it as errors print them, those through several paths of a parent by its first path."""
        found: dict[int, list[str]] = {}
        for number, path in self.edges():
            found.setdefault(number, []).append(jtu.keystr(path))
        return found

    @functools.cached_property
    def holds_leaf(self) -> list[bool]:
        """Which records hold a traced leaf, or are one."""
        found: list[bool] = []
        for op, children in self.records:
            found.append(op is LEAF or any(found[child] for child in children))
        return found

    @functools.cached_property
    def outside(self) -> dict[int, int]:
        """The records that a path through plain containers alone leads to, and how many such paths: one, or two."""
        return reached_outside(self.records, self.root)

    def is_object(self, number: int, *, containers: bool = False) -> bool:
        """Whether a record stands for a node that carries identity.

        Args:
            number: of the record.
            containers: whether mutable containers outside modules do.
        """
        node = self.node(number)
        if node is None or not node.type.carries_identity:
            return False
        return not node.type.is_plain or containers or number not in self.outside

    def text(self, number: int) -> str:
        """The first path to a record, as errors print it."""
        return jtu.keystr(self.first_paths[number])

    def node(self, number: int) -> Node | None:
        """The node that a record is, also if it is written into an object of the other side."""
        op = self.records[number][0]
        node = op.node if type(op) is Update else op
        return node if type(node) is Node else None

    def paths_to(self, chosen: Callable[[Any], bool]) -> list[str]:
        """The first paths of the leaves that a function chooses."""
        return [self.text(number) for number, leaf in self.leaves.items() if chosen(leaf)]


def leaf_paths(structure: Structure) -> list[str]:
    """The representative path of each traced leaf that `structure` itself defines, in order."""
    found = _paths.get(structure)
    if found is None:
        # JAX asks several times in each trace, and again in the next.
        first: dict[int, str] = {}
        own = set(structure.leaf_numbers)
        for number, path in edges(structure.records, [((), structure.root)]):
            if number in own and number not in first:
                first[number] = jtu.keystr(path)
        found = [first.get(number, f"<leaf {number}>") for number in structure.leaf_numbers]
        found = _paths.setdefault(structure, found)
    return found


_paths: weakref.WeakKeyDictionary[Structure, list[str]] = weakref.WeakKeyDictionary()


def with_paths(leaves: Sequence[Any], paths: Sequence[str]) -> list[tuple[LeafPath, Any]]:
    """Leaves with their paths as keys, for JAX."""
    return list(zip(map(LeafPath, paths), leaves, strict=True))
