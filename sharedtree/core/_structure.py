"""Structures: a DAG without its traced leaves, as a flat table.

    [w, Pair(w, 3)]     records  0: leaf   1: static 3   2: Pair(0, 1)   3: list(0, 2)      root 3

A DAG is packed into the list of its traced leaves, each once, and a *structure*: a flat table of records in the order
in which a depth-first walk completes them. A record is an operation and the numbers of the records that are its
children, so a shared node is one number that appears twice, and a structure is compared and hashed without any
recursion. TensorFlow's checkpoints have the same shape, called a trackable object graph.

Structures are interned: two equal ones are one object. Comparison is then `is`, which makes structures cheap as part of
JAX's cache keys. The table of interned structures holds them weakly, and JAX's own caches keep alive what they still
need. No structure is dropped while it is in use, because the next call would retrace.

In a `Context` several trees are packed one after the other. The record numbers of each then start where those of the
previous tree ended, and a number below that start refers to an object in an earlier tree.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ._interned_objects import Interned
from ._node_types import maker_of, node_type_of_class
from ._plain_containers import NodeType
from ._static_kinds import IdentityKey
from ._static_values import Static

Path = tuple[Any, ...]
"""Key entries from the root down, as in JAX's key paths."""


# --- records ----------------------------------------------------------------------------------------------------------


class Leaf:
    """Operation: take the next traced leaf. There is one instance, `LEAF`."""

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = Leaf()


class Node:
    """Operation: put a node together from its children.

    Two are equal if the classes are the same and the auxiliary data is strictly equal. `keys` name the children in
    paths. They take no part in the comparison, because class and auxiliary data determine them.
    """

    __slots__ = ("_unflatten", "aux", "keys", "type")

    def __init__(self, node_type: NodeType, aux: Static, keys: Path) -> None:
        self.type = node_type
        self.aux = aux
        self.keys = keys
        self._unflatten: Any = None

    @property
    def unflatten(self) -> Callable[[tuple[Any, ...]], Any]:
        """Function that makes a new instance of the children alone. Cached.

        Only for classes in JAX's registry whose auxiliary data cannot change: each instance gets the same.
        """
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
        # The node type holds functions, which cannot be pickled. Its class can, and leads back to it.
        return _node_of, (self.type.cls, self.aux, self.keys)


def _node_of(cls: type, aux: Static, keys: Path) -> Node:
    """Unpickles a `Node`."""
    return Node(node_type_of_class(cls), aux, keys)


class Given(NamedTuple):
    """Operation: take the caller's own object whose number is `number`.

    It occurs in the results of a function. The number refers to the records of the arguments.
    """

    number: int


class Update(NamedTuple):
    """Operation: put `node` together and write its content into the caller's object whose number is `number`.

    Attributes:
        number: the number of the object among the records of the arguments.
        node: the new content.
        received_aux: the auxiliary data of the object when the function received it. A static object in it is left
            alone if it equals its new value: the caller keeps the very object. None if the auxiliary data holds no
            static objects, or if the function got the caller's own objects and not copies.
    """

    number: int
    node: Node
    received_aux: Static | None = None

    @classmethod
    def of(cls, number: int, node: Node, received: Any) -> "Update":
        """Makes the operation for an object whose operation was `received` when it entered the function."""
        is_exact = bool(node.aux.objects)
        if type(received) is not Node or is_exact or not received.aux.has_objects:
            return cls(number, node)
        return cls(number, node, received.aux)


Op = Leaf | Static | Node | Given | Update
Record = tuple[Op, tuple[int, ...]]
"""An operation and the numbers of the records that are its children."""


# --- structures -------------------------------------------------------------------------------------------------------


class Structure:
    """A DAG without its traced leaves: node types, static leaves, sharing. Hashable; equal structures are one object.

    `sharedtree.tree.flatten` and `structure` return it, and `unflatten` takes it.

    Attributes:
        num_leaves: how many traced leaves it has, each shared one counted once.

    Can be pickled if its static values can, in time linear in the records and without recursion over them. It is
    interned again where it is unpickled, so there, too, equal structures are one object.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w, v = jnp.ones(2), jnp.zeros(3)
        >>> structure = st.tree.structure([w, w])
        >>> structure.num_leaves, structure is st.tree.structure([v, v]), structure is st.tree.structure([w, v])
        (1, True, False)
    """

    # The content, which `is_like` compares:
    #
    # `records` is the table, children before parents. `root` is the number of the record that is the whole tree.
    # `base` is the number of the first record: 0 unless earlier trees were flattened in the same `Context`.
    # `maker` stands for that Context, if there was one. It is not the Context itself, which keeps every leaf that it
    # has seen. Both are here because whoever unflattens, perhaps in another process, has only the structure. A `Given`
    # for each object of an earlier tree would say the same, but doubled the time of a flatten in a Context.
    # `noted` and `tied_values` exist only for results of functions: the traced leaves that lost their ties on purpose,
    # and those that were tied outside modules (see `ties/_leaf_notes`).
    # `objects` are the static values that were taken exactly as they are (`Rules.is_exact`) and that no equal one can
    # replace. Two structures that differ in nothing else compare equal record by record, but are two.
    #
    # Derived from the content by `complete`:
    #
    # `given` are the numbers of the caller's objects that it contains. `updates` says whether it has content to be
    # written into objects of the caller. `is_noted` says whether any leaf needs a note when the tree is put together.
    #
    # No part of the content:
    #
    # `pins` are objects that must live as long as the structure, for keys that lead to it (see `_native_walk`).
    # `plans` say how transforms group its leaves; each has what the transform does for a key. `program` is the records
    # as the native `build` runs them, None until the first build.

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
        """Numbers of its traced leaves, in order. Cost: one look at each record."""
        return [number for number, (op, _) in enumerate(self.records, self.base) if op is LEAF]

    def __repr__(self) -> str:
        return f"Structure({len(self.records)} records, {self.num_leaves} leaves)"

    def complete(self) -> None:
        """Computes the attributes that follow from the content. Called once, when no equal structure exists."""
        self.pins, self.plans = {}, {}
        self.num_leaves = sum(op is LEAF for op, _ in self.records)
        self.given = tuple(sorted({op.number for op, _ in self.records if type(op) is Given}))
        self.updates = any(type(op) is Update for op, _ in self.records)
        self.is_noted = bool(self.noted or self.tied_values)

    def is_like(self, candidate: "Structure") -> bool:
        """Compares the content of two structures. Structures of equal content are interned as one."""
        # The records come last, because comparing them may run a user's `==` for each static value.
        return (
            self.maker is candidate.maker
            and self.base == candidate.base
            and self.root == candidate.root
            and self.noted == candidate.noted
            and self.tied_values == candidate.tied_values
            and self.objects == candidate.objects
            and self.records == candidate.records
        )

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
    """Returns the one structure with this content, a new one if there is none yet. Cost: one hash over the records."""
    structure = Structure()
    structure.base, structure.records, structure.root, structure.maker = base, records, root, maker
    structure.noted, structure.tied_values, structure.program = noted, tied_values, None
    structure.objects = _objects_in(records)
    content_hash = hash((maker, base, root, noted, tied_values, structure.objects, records))
    return _interned.intern(content_hash, structure)


def _objects_in(records: Sequence[Record]) -> tuple[IdentityKey, ...]:
    """Collects the user's own static objects from all exact static values, in order."""
    objects: list[IdentityKey] = []
    # Each trace comes here several times. So the loop repeats `_static_of` instead of calling it for each record.
    for op, _ in records:
        if type(op) is Node:
            objects += op.aux.objects
        elif type(op) is Static:
            objects += op.objects
        elif type(op) is Update:
            objects += op.node.aux.objects
    return tuple(objects)


# --- records as a DAG -------------------------------------------------------------------------------------------------


NodeKey = TypeVar("NodeKey", bound=Hashable)
"""Whatever a caller of `canonical` uses to tell the nodes of its DAG apart."""


def canonical(
    root: NodeKey, expand: Callable[[NodeKey], tuple[Op, Sequence[NodeKey]]]
) -> tuple[tuple[Record, ...], dict[NodeKey, int]]:
    """Numbers the nodes of any DAG as a walk would number them.

    Args:
        root: the key of the root.
        expand: key → (operation, keys of the children). Equal keys are one node. Called once for each key.

    Returns:
        The records, and the number of each key, in the order of the numbers. The root is the last.
    """
    numbers: dict[NodeKey, int] = {}
    records: list[Record] = []
    # Each key is pushed without its operation first. A node with children is pushed again, with it, below them: when it
    # comes up the second time, all of its children have numbers.
    stack: list[tuple[NodeKey, Op | None, Sequence[NodeKey]]] = [(root, None, ())]
    while stack:
        key, op, children = stack.pop()
        if key in numbers:
            continue
        if op is None:
            op, children = expand(key)
            if children:
                stack.append((key, op, children))
                stack.extend((child, None, ()) for child in reversed(children))
                continue
        numbers[key] = len(records)
        records.append((op, tuple([numbers[child] for child in children])))
    return tuple(records), numbers


def edges(
    records: Sequence[Record],
    roots: Sequence[tuple[Path, int]],
    base: int = 0,
    keys_of: Callable[[int, Node], Path] | None = None,
) -> Iterator[tuple[int, Path]]:
    """Yields each edge of a DAG once, as the number it leads to and a path that ends with it.

    The path goes through the first path of the parent. So the first pair of a number is its representative path. Each
    record is entered once, so the cost is linear in the records even where the number of paths is exponential.

    Edges below views come last. So a path through a view represents a record only if no other path leads to it.

    Args:
        records: the table.
        roots: the paths and numbers of the records to begin at. Each counts as an edge.
        base: the number of the first record. Lower numbers are yielded and not entered.
        keys_of: (number of a record, its node) → the keys of its children. Asked only about nodes whose class does not
            determine them. None takes the keys that the nodes have.
    """
    entered: set[int] = set()
    # Children are pushed in reverse, so that they come off the stack in flatten order.
    stack: list[tuple[int, Path]] = [(number, path) for path, number in reversed(roots)]
    below_views: list[tuple[int, Path]] = []
    while stack or below_views:
        if not stack:
            stack.extend(reversed(below_views))
            below_views.clear()
        number, path = stack.pop()
        yield number, path
        if number in entered or number < base:
            continue
        entered.add(number)
        op, children = records[number - base]
        node = op.node if type(op) is Update else op
        if type(node) is Node:
            keys = keys_of(number, node) if keys_of is not None and node.type.names_children else node.keys
            children_with_keys = tuple(zip(keys, children, strict=True))
            if node.type.is_view:
                below_views.extend((child, (*path, key)) for key, child in children_with_keys)
            else:
                stack.extend((child, (*path, key)) for key, child in reversed(children_with_keys))


def at_several_paths(records: Sequence[Record], roots: Iterable[int]) -> set[int]:
    """Finds the records that several paths lead to. Everything below such a record is one, too."""
    visited: set[int] = set()
    shared: set[int] = set()
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number in shared:
            continue
        if number in visited:
            shared.add(number)
        visited.add(number)
        # A shared record is entered a second time, so that everything below it is visited twice as well.
        stack.extend(records[number][1])
    return shared


def with_several_edges(records: Sequence[Record], root: int) -> set[int]:
    """Finds the records below a root that several edges lead to.

    A record below a shared one is not among them if only one edge leads to it.
    """
    visited: set[int] = set()
    shared: set[int] = set()
    stack = [root]
    while stack:
        for child in records[stack.pop()][1]:
            if child in visited:
                shared.add(child)
            else:
                visited.add(child)
                stack.append(child)
    return shared


def reached_outside(records: Sequence[Record], root: int) -> dict[int, int]:
    """Counts, for each record, the paths that lead to it through plain containers alone.

    Returns:
        Number → 1 for one such path, 2 for two or more. A record without any is missing.

    Cost: linear in the records returned.
    """
    num_paths: dict[int, int] = {}
    stack = [root]
    while stack:
        number = stack.pop()
        count = num_paths.get(number, 0)
        # The count stops at 2, so that no record is entered a third time.
        if count == 2:
            continue
        num_paths[number] = count + 1
        op, children = records[number]
        node = op.node if type(op) is Update else op
        if type(node) is Node and node.type.is_plain:
            stack.extend(children)
    return num_paths


def statics_of(structure: Structure) -> Iterator[tuple[int, Static]]:
    """Yields the static leaves and the auxiliary data of the nodes of a structure, with the numbers of the records."""
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


def depth_of(records: Sequence[Record]) -> int:
    """Number of records on the longest path from a root to a leaf."""
    depths: list[int] = []
    # Children come before their parents, so their depths are there.
    for _, children in records:
        depths.append(1 + max((depths[child] for child in children), default=0))
    return max(depths, default=0)
