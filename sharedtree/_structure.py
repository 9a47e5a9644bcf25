"""A DAG without its traced leaves, as a flat table.

A DAG is packed into the list of its traced leaves, each once, and a *structure*: a flat table of records in the order
in which a depth-first walk completes them. A record is an operation and the numbers of the records that are its
children, so a shared node is one number that appears twice, and a structure is compared and hashed without any
recursion. The same shape serves in TensorFlow's checkpoints, where it is called a trackable object graph.

Structures are interned: two equal ones are one object, so comparison is `is`, which is what makes them cheap as part
of JAX's cache keys. The table of interned structures holds them weakly; JAX's own caches keep those alive that it
still needs. Nothing is evicted while it is in use, for that would retrace.

Several trees can be packed in one crossing. The record numbers of each then start where those of the one before it
ended, and a number below that start refers to an object in an earlier tree.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ._node_types import NodeType
from ._statics import Static

Path = tuple[Any, ...]


class Leaf:
    """Operation: the next traced leaf. There is one instance, `LEAF`."""

    def __repr__(self) -> str:
        return "LEAF"


LEAF = Leaf()


class Node:
    """Operation: put a node together from its children.

    Equal if the classes are the same and the auxiliary data is strictly equal. `keys` name the children in paths and
    take no part in the comparison, since class and auxiliary data determine them.
    """

    __slots__ = ("aux", "keys", "type")

    def __init__(self, node_type: NodeType, aux: Static, keys: Path) -> None:
        self.type = node_type
        self.aux = aux
        self.keys = keys

    def __eq__(self, other: object) -> bool:
        return type(other) is Node and self.type.cls is other.type.cls and self.aux == other.aux

    def __hash__(self) -> int:
        return hash((self.type.cls, self.aux))

    def __repr__(self) -> str:
        return f"Node({self.type.cls.__name__})"


class Given(NamedTuple):
    """Operation: the very object that is number `number` on the other side of the crossing."""

    number: int


class Update(NamedTuple):
    """Operation: put `node` together and write its content into object `number` on the other side of the crossing."""

    number: int
    node: Node


Op = Leaf | Static | Node | Given | Update
Record = tuple[Op, tuple[int, ...]]


class Structure:
    """A DAG without its traced leaves: node types, static leaves, sharing. Hashable; equal structures are one object.

    Attributes:
        base: the number of the first record; 0 unless earlier trees were packed in the same crossing.
        records: the table, children before parents.
        root: the number of the record that is the whole tree.
        num_leaves: how many traced leaves it has, each shared one counted once.
        maker: the `Context` in which it was made, if that was one that spans several trees.
    """

    __slots__ = ("__weakref__", "base", "maker", "num_leaves", "records", "root")

    base: int
    records: tuple[Record, ...]
    root: int
    num_leaves: int
    maker: Any

    def __repr__(self) -> str:
        return f"Structure({len(self.records)} records, {self.num_leaves} leaves)"

    def __copy__(self) -> "Structure":
        return self

    def __deepcopy__(self, memo: Any) -> "Structure":
        return self


_interned: "weakref.WeakValueDictionary[Any, Structure]" = weakref.WeakValueDictionary()
_interning = threading.RLock()  # re-entrant: comparing keys may run a user's `__eq__`


def intern(records: tuple[Record, ...], root: int, base: int = 0, maker: Any = None) -> Structure:
    """The one structure with this content. Cost: one hash over the records."""
    key = (maker, base, root, records)
    with _interning:
        structure = _interned.get(key)
        if structure is None:
            structure = Structure()
            structure.base, structure.records, structure.root, structure.maker = base, records, root, maker
            structure.num_leaves = sum(op is LEAF for op, _ in records)
            _interned[key] = structure
    return structure


Key = TypeVar("Key", bound=Hashable)


def canonical(
    root: Key, expand: Callable[[Key], tuple[Op, Sequence[Key]]]
) -> tuple[tuple[Record, ...], dict[Key, int]]:
    """Numbers the nodes of any DAG as a walk would number them.

    Args:
        root: names the root.
        expand: name → (operation, names of the children). Equal names are one node.

    Returns:
        The records, and the number of each name, in the order of the numbers; the root is the last.
    """
    numbers: dict[Key, int] = {}
    records: list[Record] = []
    stack: list[tuple[Key, Op | None, Sequence[Key]]] = [(root, None, ())]
    while stack:
        name, op, children = stack.pop()
        if name in numbers:
            continue
        if op is None:
            op, children = expand(name)
            if children:
                stack.append((name, op, children))
                stack.extend((child, None, ()) for child in reversed(children))
                continue
        numbers[name] = len(records)
        records.append((op, tuple([numbers[child] for child in children])))
    return tuple(records), numbers


def depth_of(records: Sequence[Record]) -> int:
    """How deeply the records are nested."""
    depths: list[int] = []
    for _, children in records:
        depths.append(1 + max((depths[child] for child in children), default=0))
    return max(depths, default=0)


def edges(records: Sequence[Record], roots: Sequence[tuple[Path, int]], base: int = 0) -> Iterator[tuple[int, Path]]:
    """Every way into every record, once each: (number, path), the path going through each parent's first path.

    The first pair of a number is its representative path. A walk of the DAG, not of its unfolding: the cost is linear
    in the records even where the number of paths is exponential. Numbers below `base` are yielded and not entered.
    """
    seen: set[int] = set()
    stack: list[tuple[int, Path]] = [(number, path) for path, number in reversed(roots)]
    while stack:
        number, path = stack.pop()
        yield number, path
        if number in seen or number < base:
            continue
        seen.add(number)
        op, children = records[number - base]
        node = op.node if type(op) is Update else op
        if type(node) is Node:
            pairs = zip(node.keys, children, strict=True)
            stack.extend((child, (*path, key)) for key, child in reversed(tuple(pairs)))
