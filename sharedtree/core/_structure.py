"""A DAG without its traced leaves, as a flat table.

A DAG is packed into the list of its traced leaves, each once, and a *structure*: a flat table of records in the order
in which a depth-first walk completes them. A record is an operation and the numbers of the records that are its
children, so a shared node is one number that appears twice, and a structure is compared and hashed without any
recursion. The same shape serves in TensorFlow's checkpoints, where it is called a trackable object graph.

Structures are interned: two equal ones are one object, so comparison is `is`, which is what makes them cheap as part
of JAX's cache keys. The table of interned structures holds them weakly; JAX's own caches keep those alive that it
still needs. Nothing is evicted while it is in use, for that would retrace.

In a `Context` several trees are packed one after the other. The record numbers of each then start where those of the
one before it ended, and a number below that start refers to an object in an earlier tree.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ._interned_objects import Interned
from ._node_types import maker_of, node_type_of_class
from ._plain_containers import NodeType
from ._static_kinds import IdentityKey
from ._static_values import Static

Path = tuple[Any, ...]


class Leaf:
    """Operation: the next traced leaf. There is one instance, `LEAF`."""

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = Leaf()


class Node:
    """Operation: put a node together from its children.

    Equal if the classes are the same and the auxiliary data is strictly equal. `keys` name the children in paths and
    take no part in the comparison, since class and auxiliary data determine them.
    """

    __slots__ = ("_unflatten", "aux", "keys", "type")

    def __init__(self, node_type: NodeType, aux: Static, keys: Path) -> None:
        self.type = node_type
        self.aux = aux
        self.keys = keys
        self._unflatten: Any = None

    @property
    def unflatten(self) -> Callable[[tuple[Any, ...]], Any]:
        """For classes in JAX's registry, whose auxiliary data nobody can change: children → a new instance."""
        if self._unflatten is None:
            self._unflatten = maker_of(self.type.cls, self.aux.peek(), len(self.keys))
        return self._unflatten

    def __eq__(self, other: object) -> bool:
        return type(other) is Node and self.type.cls is other.type.cls and self.aux == other.aux

    def __hash__(self) -> int:
        return hash((self.type.cls, self.aux))

    def __repr__(self) -> str:
        return f"Node({self.type.cls.__name__})"

    def __reduce__(self) -> Any:
        # How the class comes apart is code; whoever unpickles this finds it by the class, as for its own objects.
        return _node_of, (self.type.cls, self.aux, self.keys)


def _node_of(cls: type, aux: Static, keys: Path) -> Node:
    return Node(node_type_of_class(cls), aux, keys)


class Given(NamedTuple):
    """Operation: the very object that is number `number` on the other side of the crossing."""

    number: int


class Update(NamedTuple):
    """Operation: put `node` together and write its content into object `number` on the other side of the crossing.

    Attributes:
        number: Of the object.
        node: What it is to be.
        before: The auxiliary data that it had when the function received it. A static object in it that equals its new
            value is left alone, so that the caller still finds his own. None if it holds no such object, or if the
            function got the caller's own.
    """

    number: int
    node: Node
    before: Static | None = None

    @classmethod
    def of(cls, number: int, node: Node, received: Any) -> "Update":
        """The operation for an object whose record was `received`."""
        is_exact = bool(node.aux.objects)
        before = received.aux if type(received) is Node and not is_exact and received.aux.has_objects else None
        return cls(number, node, before)


Op = Leaf | Static | Node | Given | Update
Record = tuple[Op, tuple[int, ...]]


class Structure:
    """A DAG without its traced leaves: node types, static leaves, sharing. Hashable; equal structures are one object.

    `sharedtree.tree.flatten` and `structure` return it, and `unflatten` takes it.

    Attributes:
        num_leaves: how many traced leaves it has, each shared one counted once.

    Can be pickled if its static values can, in time linear in the records and without recursion over them; it is
    interned again where it arrives, so there, too, equal ones are one object.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w, v = jnp.ones(2), jnp.zeros(3)
        >>> structure = st.tree.structure([w, w])
        >>> structure.num_leaves, structure is st.tree.structure([v, v]), structure is st.tree.structure([w, v])
        (1, True, False)
    """

    # The content: `records` is the table, children before parents, `root` the number of the record that is the whole
    # tree, `base` that of the first one, 0 unless earlier trees were flattened in the same `Context`. `maker` stands
    # for that Context, if there was one; it is not the Context itself, which keeps every leaf that it has seen. Both
    # are here because whoever unflattens, perhaps in another process, has the structure and nothing beside it. As
    # records, with a `Given` for each object of an earlier tree, they doubled the time of a flatten in a Context.
    # `noted` and `tied_values`, only for results of functions: which of the traced leaves lost their ties on purpose,
    # and which were tied outside modules (see `ties/_leaf_notes`).
    #
    # What follows from it: `given`, the numbers that it takes from the other side; `updates`, whether it has content
    # that is to be written into objects of the other side; `is_noted`, whether something is noted of its leaves when
    # its tree is put together.
    #
    # `objects`: of the static values that were taken exactly as they are (`Rules.is_exact`), those for which an equal
    # one does not do. Two structures that differ in nothing else compare equal record by record, but are two.
    #
    # No part of it: `pins`, what must live as long as this, for keys that lead to it (see `_native_walk`); `plans`,
    # how transforms deal its leaves, by what they do; `program`, the records as the native `build` runs them, once it
    # has.

    __slots__ = (
        "__weakref__",
        "base",
        "given",
        "is_noted",
        "maker",
        "noted",
        "num_leaves",
        "objects",
        "pins",
        "plans",
        "program",
        "records",
        "root",
        "tied_values",
        "updates",
    )

    base: int
    records: tuple[Record, ...]
    root: int
    num_leaves: int
    given: tuple[int, ...]
    updates: bool
    is_noted: bool
    maker: Any
    noted: tuple[int, ...]
    objects: tuple[IdentityKey, ...]
    tied_values: tuple[int, ...]
    pins: dict[bytes, tuple[Any, ...]]
    plans: dict[Any, Any]
    program: Any

    @property
    def leaf_numbers(self) -> list[int]:
        """The numbers of its traced leaves, in order."""
        return [number for number, (op, _) in enumerate(self.records, self.base) if op is LEAF]

    def __repr__(self) -> str:
        return f"Structure({len(self.records)} records, {self.num_leaves} leaves)"

    def complete(self) -> None:
        """Works out what follows from the content."""
        self.pins, self.plans = {}, {}
        self.num_leaves = sum(op is LEAF for op, _ in self.records)
        self.given = tuple(sorted({op.number for op, _ in self.records if type(op) is Given}))
        self.updates = any(type(op) is Update for op, _ in self.records)
        self.is_noted = bool(self.noted or self.tied_values)

    def is_like(self, other: "Structure") -> bool:
        """Whether another one has the same content, that is, whether it is to be this one."""
        same = self.maker is other.maker and self.base == other.base and self.root == other.root
        same = same and self.noted == other.noted and self.tied_values == other.tied_values
        same = same and self.objects == other.objects
        return same and self.records == other.records

    def __copy__(self) -> "Structure":
        return self

    def __deepcopy__(self, memo: Any) -> "Structure":
        return self

    def __reduce__(self) -> Any:
        return intern, (self.records, self.root, self.base, self.maker, self.noted, self.tied_values)


_interned: Interned[Structure] = Interned()


def intern(
    records: tuple[Record, ...],
    root: int,
    base: int = 0,
    maker: Any = None,
    noted: tuple[int, ...] = (),
    tied_values: tuple[int, ...] = (),
) -> Structure:
    """The one structure with this content. Cost: one hash over the records."""
    structure = Structure()
    structure.base, structure.records, structure.root, structure.maker = base, records, root, maker
    structure.noted, structure.tied_values, structure.program = noted, tied_values, None
    structure.objects = _objects_in(records)
    number = hash((maker, base, root, noted, tied_values, structure.objects, records))
    return _interned.intern(number, structure)


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


def at_several_paths(records: Sequence[Record], roots: Iterable[int]) -> set[int]:
    """The records to which several paths lead."""
    met: set[int] = set()
    found: set[int] = set()
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number in found:
            continue
        if number in met:
            found.add(number)
        met.add(number)
        stack.extend(records[number][1])  # the second time for all below it
    return found


def with_several_edges(records: Sequence[Record], root: int) -> set[int]:
    """The records below a root that several edges lead to, and not only one that several paths lead to."""
    met: set[int] = set()
    found: set[int] = set()
    stack = [root]
    while stack:
        for child in records[stack.pop()][1]:
            if child in met:
                found.add(child)
            else:
                met.add(child)
                stack.append(child)
    return found


def reached_outside(records: Sequence[Record], root: int) -> dict[int, int]:
    """The records that a path through plain containers alone leads to, and how many such paths: one, or two for more.

    Cost: linear in the records found.
    """
    found: dict[int, int] = {}
    stack = [root]
    while stack:
        number = stack.pop()
        paths = found.get(number, 0)
        if paths == 2:
            continue
        found[number] = paths + 1
        op, children = records[number]
        node = op.node if type(op) is Update else op
        if type(node) is Node and node.type.is_plain:
            stack.extend(children)
    return found


def statics_of(structure: Structure) -> Iterator[tuple[int, Static]]:
    """The numbers of its static leaves and nodes, each with its static data."""
    for number, (op, _) in enumerate(structure.records, structure.base):
        static = _static_of(op)
        if static is not None:
            yield number, static


def _static_of(op: Op) -> Static | None:
    """The static value of a record: a static leaf, or the auxiliary data of a node."""
    node = op.node if type(op) is Update else op
    if type(node) is Node:
        return node.aux
    return node if type(node) is Static else None


def _objects_in(records: Sequence[Record]) -> tuple[IdentityKey, ...]:
    """The user's own static objects, of all exact static values, in order."""
    found: list[IdentityKey] = []
    # Written out, for each trace comes here several times.
    for op, _ in records:
        if type(op) is Node:
            found += op.aux.objects
        elif type(op) is Static:
            found += op.objects
        elif type(op) is Update:
            found += op.node.aux.objects
    return tuple(found)


def depth_of(records: Sequence[Record]) -> int:
    """How deeply the records are nested."""
    depths: list[int] = []
    for _, children in records:
        depths.append(1 + max((depths[child] for child in children), default=0))
    return max(depths, default=0)


def edges(
    records: Sequence[Record],
    roots: Sequence[tuple[Path, int]],
    base: int = 0,
    keys_of: Callable[[int, Node], Path] | None = None,
) -> Iterator[tuple[int, Path]]:
    """Every way into every record, once each: (number, path), the path going through each parent's first path.

    The first pair of a number is its representative path. A walk of the DAG, not of its unfolding: the cost is linear
    in the records even where the number of paths is exponential. Numbers below `base` are yielded and not entered.

    Args:
        records: The table.
        roots: Where to begin: paths, and the numbers of records.
        base: The number of the first record.
        keys_of: (number of a record, its node) → the keys of its children. Asked only of nodes whose class does not say
            what they are; those of the node if it is not given.
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
            keys = keys_of(number, node) if keys_of is not None and node.type.names_children else node.keys
            pairs = zip(keys, children, strict=True)
            stack.extend((child, (*path, key)) for key, child in reversed(tuple(pairs)))
