"""Structures and flat DAGs: a DAG as a flat table of records. A flat DAG has its objects, too; a structure has none.

    Pair(w, [w, 3])     records  0: leaf   1: static 3   2: list(0, 1)   3: Pair(0, 2)      root 3
                        objects  w         3             [w, 3]          Pair(...)
                        paths    .a        .b[1]         .b              (the root)

A DAG is packed into the list of its traced leaves, each once, and a *structure*. This is a flat table of records, in
the order in which a depth-first walk completes them. A record is an operation and the numbers of the records that are
its children. So a shared node is one number that appears twice, and no recursion is needed to compare or hash a
structure. TensorFlow's checkpoints have the same shape, called a trackable object graph.

Structures are interned: of equal ones only one object exists. Comparison is then `is`, which makes structures cheap as
part of JAX's cache keys. The table of interned structures holds them weakly. JAX's caches hold the structures of the
programs that they keep. So a structure lives as long as a compiled program needs it: without it, the next call would
retrace.

In a `Context` several trees are packed one after the other. The record numbers of each then start where those of the
previous tree ended, and a number below that start refers to an object in an earlier tree.

A `FlatDag` has the same records and besides, by number, the objects that they stand for and their paths.

A record is *shared* if several edges lead to it. It has one path for each way down from the root. The first of these in
flatten order is its *representative path*.

A record is *outside modules* if some path to it leads through plain containers alone. It may also be inside modules, by
other paths.

The result of a function may contain *objects of the caller*, which the function received in its arguments. It returns
one unchanged (`Given`), or the changed content is to be written back into it (`Update`). Both operations refer to the
object by the number of its record in the arguments.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax import tree_util as jtu

from ._by_identity import Interned
from ._call_arguments import LeafPath
from ._node_types import NodeType, Role, maker_of, node_type_of_class
from ._static_values import IdentityKey, Static

Path = tuple[Any, ...]
"""Key entries from the root down, as in JAX's key paths."""


# --- records ----------------------------------------------------------------------------------------------------------


class Leaf:
    """Operation: take the next traced leaf. There is one instance, `LEAF`."""

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        # To pickle, this text is the name of a global variable. So unpickling returns the one instance.
        return "LEAF"


LEAF = Leaf()


class Node:
    """Operation: put a node together from its children.

    Two are equal if the classes are the same and the auxiliary data is strictly equal: by type and value.

    Attributes:
        type: the node type of the class.
        aux: the auxiliary data.
        keys: one key entry for each child, its name in paths. Keys take no part in the comparison, because for
            most classes they follow from the class and the auxiliary data. For a class where they do not
            (`NodeType.keys_vary`), these are the keys of the first instance with this structure.
    """

    __slots__ = ("_unflatten", "aux", "keys", "type")

    def __init__(self, node_type: NodeType, aux: Static, keys: Path) -> None:
        self.type = node_type
        self.aux = aux
        self.keys = keys
        self._unflatten: Any = None

    @property
    def unflatten(self) -> Callable[[tuple[Any, ...]], Any]:
        """Function that makes a new instance: children → instance. Cached.

        Only for a namedtuple or a class in JAX's registry, and only with immutable auxiliary data: all
        instances get the same object as auxiliary data.
        """
        if self._unflatten is None:
            # `peek` returns the stored value itself and no copy.
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
    """Makes a `Node` again when it is unpickled. See `Node.__reduce__`."""
    return Node(node_type_of_class(cls), aux, keys)


class Given(NamedTuple):
    """Operation: take an object passed in by the caller, unchanged. Only in results of functions.

    Attributes:
        number: the number of the object among the records of the arguments.
    """

    number: int


class Update(NamedTuple):
    """Operation: put `node` together and write its content into the caller's object with number `number`.

    Only in results of functions.

    Attributes:
        number: the number of the object among the records of the arguments.
        node: the new content.
        received_aux: the auxiliary data of the object when the function received it. It is compared with the new one:
            a static object of the caller, such as a config, is not replaced if its new value is equal. None if there
            is nothing to compare: the auxiliary data holds no such objects, or the function got the caller's own ones
            and not copies.
    """

    number: int
    node: Node
    received_aux: Static | None = None

    @classmethod
    def of(cls, number: int, node: Node, received: Any) -> "Update":
        """Makes the operation, and decides whether it needs `received_aux`.

        Args:
            number: the number of the object among the records of the arguments.
            node: the new content.
            received: the operation of the object in the arguments.
        """
        # Only a walk that takes static objects uncopied sets `exact_objects`. So if there are any, the function got the
        # caller's own objects. If there are none, there may still be copies of objects to compare.
        holds_uncopied_objects = bool(node.aux.exact_objects)
        # `has_irreplaceable_objects`: the value is or holds an object, such as a config, for which an equal one is no
        # substitute.
        if type(received) is not Node or holds_uncopied_objects or not received.aux.has_irreplaceable_objects:
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
    # `context_mark` stands for that Context, if there was one. It is not the Context itself, which keeps alive every
    # leaf that it has seen. Both are here because whoever unflattens, perhaps in another process, has only the
    # structure. A `Given` for each object of an earlier tree would say the same, but doubled the time of a flatten.
    # `noted` and `tied_values` exist only for results of functions. Both are indices among the traced leaves. `noted`
    # are leaves with a lost tie that needs no warning any more: it was undone on purpose, or reported. `tied_values`
    # are leaves that were tied outside modules. When a tree of this structure is put together, the leaves of both are
    # entered into the tables of `ties/_leaf_notes` again.
    # `objects` are the user's static objects that were taken uncopied (`Rules.is_exact`) and for which an equal object
    # is no substitute. Equal records may hold different ones of these, because a `Static` compares its value and not
    # its objects. So `objects` is content besides the records.
    #
    # Derived from the content by `complete`:
    #
    # `given` are the numbers of the caller's objects that it contains (`Given`). `updates` is True if it has content to
    # be written into objects of the caller (`Update`). `is_noted` is True if `noted` or `tied_values` has any leaf.
    #
    # No part of the content:
    #
    # `pins` are objects that must live as long as the structure, for keys that lead to it (see `_pack_and_unpack`).
    # `plans` has results of transforms and checks about the structure, each under a key of its own: mostly how a
    # transform groups the leaves. `program` is the records as the native `build` runs them; None until the first build.

    __slots__ = (
        "__weakref__",
        "base",
        "context_mark",
        "given",
        "is_noted",
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
    context_mark: Any
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
        """Computes the attributes derived from the content, and makes the empty tables `pins` and `plans`.

        `Interned.intern` calls it for a new structure, if the table has no equal one.
        """
        self.pins, self.plans = {}, {}
        self.num_leaves = sum(op is LEAF for op, _ in self.records)
        self.given = tuple(sorted({op.number for op, _ in self.records if type(op) is Given}))
        self.updates = any(type(op) is Update for op, _ in self.records)
        self.is_noted = bool(self.noted or self.tied_values)

    def is_like(self, candidate: "Structure") -> bool:
        """Returns True if two structures have equal content. `Interned.intern` then makes one object of them."""
        # The records come last, because comparing them may run a user's `==` for each static value.
        return (
            self.context_mark is candidate.context_mark
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
        # `objects` is missing here, because `intern` collects it from the records.
        return intern, (self.records, self.root, self.base, self.context_mark, self.noted, self.tied_values)


_interned: Interned[Structure] = Interned()


def intern(
    records: tuple[Record, ...],
    root: int,
    base: int = 0,
    context_mark: Any = None,
    noted: tuple[int, ...] = (),
    tied_values: tuple[int, ...] = (),
) -> Structure:
    """Returns the one structure with this content. Makes it if none is alive.

    Cost: one hash over the records. If there is one already, also one comparison with it.

    Args:
        records: the table, children before parents.
        root: the number of the record for the whole tree.
        base: the number of the first record. Lower numbers refer to earlier trees of the same `Context`.
        context_mark: stands for that `Context`; None outside of one.
        noted: in the result of a function, the indices of leaves with a tie that was undone on purpose or reported.
        tied_values: in the result of a function, the indices of the leaves tied outside modules.
    """
    structure = Structure()
    structure.base, structure.records, structure.root, structure.context_mark = base, records, root, context_mark
    structure.noted, structure.tied_values, structure.program = noted, tied_values, None
    structure.objects = _objects_in(records)
    # The attributes that follow from these are computed in `complete`, for a new structure only.
    content_hash = hash((context_mark, base, root, noted, tied_values, structure.objects, records))
    return _interned.intern(content_hash, structure)


def _objects_in(records: Sequence[Record]) -> tuple[IdentityKey, ...]:
    """Collects the user's static objects taken uncopied: `exact_objects` of each static value, in order."""
    exact_objects: list[IdentityKey] = []
    # Each trace comes here several times. So the code of `_static_of` is repeated here, which is faster than a call.
    for op, _ in records:
        if type(op) is Node:
            exact_objects += op.aux.exact_objects
        elif type(op) is Static:
            exact_objects += op.exact_objects
        elif type(op) is Update:
            exact_objects += op.node.aux.exact_objects
    return tuple(exact_objects)


# --- records as a DAG -------------------------------------------------------------------------------------------------


NodeKey = TypeVar("NodeKey", bound=Hashable)
"""Whatever tells the nodes of a DAG apart for a caller of `canonical_records`: a number, or a pair of numbers."""


def canonical_records(
    root: NodeKey, expand: Callable[[NodeKey], tuple[Op, Sequence[NodeKey]]]
) -> tuple[tuple[Record, ...], dict[NodeKey, int]]:
    """Makes the records of any DAG, numbered as a walk would number them: children first, in flatten order.

    Records that nothing below the root refers to are left out. So this also renumbers the part of a table below a root.

    Args:
        root: the key of the root.
        expand: key → (operation, keys of the children). Equal keys are one node. Called once for each key.

    Returns:
        The records, and key → number. The entries are in the order of the numbers, and the root is the last.
    """
    numbers: dict[NodeKey, int] = {}
    records: list[Record] = []
    # Each entry is (key, operation, keys of the children). At first a key is pushed with None as its operation. When it
    # comes off the stack, a node with children is pushed again with its operation, and the children above it. So when
    # it comes off the second time, all of its children have numbers.
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
    """Yields (number, path) for each edge of a DAG: the record at the end of the edge, and a path that ends with it.

        Pair(w, [w, 3])     (3, the root)   (0, .a)   (2, .b)   (0, .b[0])   (1, .b[1])

    The path is the representative path of the parent and one step more. The first path yielded for a record is its
    representative path. Each record is entered once. So the cost is linear in the edges even where the number of paths
    is exponential.

    The order is flatten order, but edges below views come last. So a path through a view represents a record only if no
    other path leads to it.

    Args:
        records: the table.
        roots: (path, number) of each record to begin at, in this order. Each root counts as an edge.
        base: the number of the first record. A lower number refers to an earlier tree: it is yielded, but nothing
            below it is.
        keys_of: (number of a record, its node) → the keys of its children. Called only for a node with keys that may
            depend on the instance. None takes the keys that the nodes have.
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
        # A shared record is yielded for each edge to it, but its children only once.
        if number in entered or number < base:
            continue
        entered.add(number)
        op, children = records[number - base]
        node = op.node if type(op) is Update else op
        if type(node) is Node:
            keys = keys_of(number, node) if keys_of is not None and node.type.keys_vary else node.keys
            children_with_keys = tuple(zip(keys, children, strict=True))
            if node.type.is_view:
                below_views.extend((child, (*path, key)) for key, child in children_with_keys)
            else:
                stack.extend((child, (*path, key)) for key, child in reversed(children_with_keys))


def records_at_several_paths(records: Sequence[Record], roots: Iterable[int]) -> set[int]:
    """Finds the records to which several paths lead: the shared records, and everything below them.

        Pair([w], [w, 3])           w
        Pair(a, a) with a = [w]     the list and w

    Args:
        records: the records of a tree, numbered from 0.
        roots: the numbers of the records where paths begin. The same number twice counts as two paths.

    Returns:
        The numbers of the records.
    """
    visited: set[int] = set()
    at_several_paths: set[int] = set()
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number in at_several_paths:
            continue
        if number in visited:
            at_several_paths.add(number)
        visited.add(number)
        # A shared record is entered a second time, so that everything below it is visited twice as well.
        _, children = records[number]
        stack.extend(children)
    return at_several_paths


def records_with_several_edges(records: Sequence[Record], root: int) -> set[int]:
    """Finds the shared records below a root: those to which several edges lead.

        Pair([w], [w, 3])           w
        Pair(a, a) with a = [w]     the list, but not w: one edge leads to w

    Args:
        records: the records of a tree, numbered from 0.
        root: the number of the record to begin at.

    Returns:
        The numbers of the records. Two edges may come from one parent, as in `(w, w)`.
    """
    visited: set[int] = set()
    shared: set[int] = set()
    stack = [root]
    while stack:
        _, children = records[stack.pop()]
        for child in children:
            if child in visited:
                shared.add(child)
            else:
                visited.add(child)
                stack.append(child)
    return shared


def records_outside_modules(records: Sequence[Record], root: int) -> dict[int, int]:
    """Finds the records outside modules: those to which a path leads through plain containers alone.

        [w, Pair(w, v)]     the list: 1   w: 1   the pair: 1     (the pair is a module, so v is only inside)

    A record that is outside by one path and inside a module by another one counts, too.

    Args:
        records: the records of a tree, numbered from 0.
        root: the number of the record to begin at.

    Returns:
        Number → how many of these paths lead to the record: 1, or 2 for several. A record that is only inside modules
        is missing.

    Cost: linear in the records returned.
    """
    num_paths: dict[int, int] = {}
    stack = [root]
    while stack:
        number = stack.pop()
        count = num_paths.get(number, 0)
        # The count stops at 2, so no record is entered more than twice.
        if count == 2:
            continue
        num_paths[number] = count + 1
        # Only plain containers are entered, because nothing below a module is outside.
        op, children = records[number]
        node = op.node if type(op) is Update else op
        if type(node) is Node and node.type.is_plain:
            stack.extend(children)
    return num_paths


def statics_of(structure: Structure) -> Iterator[tuple[int, Static]]:
    """Yields (number of the record, `Static`) for each static leaf, and for the auxiliary data of each node."""
    for number, (op, _) in enumerate(structure.records, structure.base):
        static = _static_of(op)
        if static is not None:
            yield number, static


def _static_of(op: Op) -> Static | None:
    """Returns the static value of a record: a static leaf, or the auxiliary data of a node. None for all others."""
    node = op.node if type(op) is Update else op
    if type(node) is Node:
        return node.aux
    return node if type(node) is Static else None


def depth_of(records: Sequence[Record]) -> int:
    """Returns the number of records on the longest path down through a table numbered from 0. 0 for an empty table."""
    depths: list[int] = []
    # Children come before their parents, so their depths are in the list already.
    for _, children in records:
        depths.append(1 + max((depths[child] for child in children), default=0))
    return max(depths, default=0)


# --- flat DAGs --------------------------------------------------------------------------------------------------------


class FlatDag:
    """The records of a packed tree, and their objects.

    Everything else is computed on first use and cached. A part of the tree (`below`, `child`) is a `FlatDag` with the
    same table of records and objects, and another root.

    Args:
        records: the table, children before parents, numbered from 0.
        root: the number of the record for the whole tree.
        objects: number → object. Objects may be missing if no caller will ask for them.
    """

    def __init__(self, records: Sequence[Record], root: int, objects: Sequence[Any] | Mapping[int, Any] = ()) -> None:
        self.records = records
        self.root = root
        self.objects: Any = objects

    @classmethod
    def of(cls, structure: Structure, objects: Sequence[Any] | Mapping[int, Any] = ()) -> "FlatDag":
        """Wraps a structure and the objects of its tree."""
        dag = cls(structure.records, structure.root, objects)
        # This fills the cached property, which would intern the records once more.
        dag.structure = structure
        return dag

    @classmethod
    def without_objects(cls, structure: Structure) -> "FlatDag":
        """Wraps a structure without a tree. Its objects are unknown, so None stands for each of them."""
        return cls.of(structure, [None] * len(structure.records))

    @classmethod
    def of_leaves(cls, structure: Structure, leaves: Sequence[Any]) -> "FlatDag":
        """Wraps a structure and its traced leaves. The objects of nodes and static leaves are missing."""
        return cls.of(structure, dict(zip(structure.leaf_numbers, leaves, strict=True)))

    def below(self, root: int) -> "FlatDag":
        """Returns the part of the tree below a record. The record becomes the root. Numbers stay the same."""
        return FlatDag(self.records, root, self.objects)

    def child(self, position: int) -> "FlatDag":
        """Returns the part below one child of the root, by its position among the children."""
        _, children = self.records[self.root]
        return self.below(children[position])

    def edges(self, path: Path = ()) -> Iterator[tuple[int, Path]]:
        """Yields (number, path) for each edge. See the function `edges`.

        Args:
            path: the path to the root, with which all of these paths begin.
        """
        return edges(self.records, [(path, self.root)], keys_of=self._keys_of)

    def _keys_of(self, number: int, node: Node) -> Path:
        """Returns the keys of a node's children, from the object where that is possible.

        `node` has keys, too, but they are those of the first tree with this structure. Equal auxiliary data need not
        mean equal keys, since a class may take the keys from anywhere. So `node.keys` serve only as a fallback.
        """
        # The object is missing, as in a DAG that `of_leaves` has made.
        if not self._has_object(number):
            return node.keys
        # The object is None (`without_objects`), or a function has changed its class since it was packed.
        obj = self.objects[number]
        if type(obj) is not node.type.cls:
            return node.keys
        try:
            keys = node.type.keys_of(obj)
        except Exception:  # noqa: BLE001 -- a function may have left the object in any state
            return node.keys
        # A function may have added or removed children of the object.
        return keys if len(keys) == len(node.keys) else node.keys

    def _has_object(self, number: int) -> bool:
        """Returns True if `objects`, a mapping or a sequence, has an entry with this number."""
        objects = self.objects
        return number in objects if isinstance(objects, Mapping) else number < len(objects)

    @functools.cached_property
    def structure(self) -> Structure:
        """The structure with these records. Outside of any `Context`."""
        return intern(tuple(self.records), self.root)

    @functools.cached_property
    def leaf_numbers(self) -> list[int]:
        """Numbers of all traced leaves in the table, in order.

        In a part of a tree, the table also has leaves outside the part. `reached` has only records of the part.
        """
        return [number for number, (op, _) in enumerate(self.records) if op is LEAF]

    @functools.cached_property
    def reached(self) -> set[int]:
        """Numbers of the root and of the records below it. In a part of a tree, the table has other records, too."""
        _, numbers = canonical_records(self.root, lambda number: self.records[number])
        return set(numbers)

    @functools.cached_property
    def leaves(self) -> dict[int, Any]:
        """Number → traced leaf, for all of `leaf_numbers`."""
        return {number: self.objects[number] for number in self.leaf_numbers}

    @functools.cached_property
    def first_paths(self) -> dict[int, Path]:
        """Number → representative path, for the root and each record below it."""
        first_paths: dict[int, Path] = {}
        for number, path in self.edges():
            first_paths.setdefault(number, path)
        return first_paths

    @functools.cached_property
    def paths_of_edges(self) -> dict[int, list[str]]:
        """Number → one path for each edge to the record, as errors print it. The representative path comes first.

        Each is the representative path of a parent and one step more. A record below a shared one has more paths than
        these, perhaps exponentially many.
        """
        paths_of_edges: dict[int, list[str]] = {}
        for number, path in self.edges():
            paths_of_edges.setdefault(number, []).append(jtu.keystr(path))
        return paths_of_edges

    @functools.cached_property
    def holds_leaf(self) -> list[bool]:
        """Number → True if the record is a traced leaf or has one below it."""
        holds_leaf: list[bool] = []
        # Children come before their parents, so their answers are in the list already.
        for op, children in self.records:
            holds_leaf.append(op is LEAF or any(holds_leaf[child] for child in children))
        return holds_leaf

    @functools.cached_property
    def outside(self) -> dict[int, int]:
        """Number → how many paths outside modules lead to the record: 1, or 2 for several.

        Has only records outside modules, so `number in dag.outside` asks whether a record is one of them. See
        `records_outside_modules`.
        """
        return records_outside_modules(self.records, self.root)

    def is_object(self, number: int, *, containers: bool = False) -> bool:
        """Returns True if a record is an object in a narrow sense: a node with identity.

        A module carries identity everywhere. A mutable container, such as a list, carries identity if it is only inside
        modules. If it is outside modules, too, only its content counts, unless `containers` is True. False for leaves,
        although an array may carry identity.

        Args:
            number: the number of the record.
            containers: whether mutable containers carry identity outside modules, too.
        """
        node = self.node(number)
        if node is None or not node.type.carries_identity:
            return False
        return not node.type.is_plain or containers or number not in self.outside

    def text(self, number: int) -> str:
        """Returns the representative path of a record, as errors print it."""
        return jtu.keystr(self.first_paths[number])

    def node(self, number: int) -> Node | None:
        """Returns the node of a record: the `Node`, or the one in an `Update`. None for any other record."""
        op = self.records[number][0]
        node = op.node if type(op) is Update else op
        return node if type(node) is Node else None

    def paths_to(self, is_chosen: Callable[[Any], bool]) -> list[str]:
        """Returns the representative paths of the traced leaves for which `is_chosen` returns true."""
        return [self.text(number) for number, leaf in self.leaves.items() if is_chosen(leaf)]


def leaf_paths(structure: Structure) -> list[str]:
    """Returns the representative path of each traced leaf of a structure, in order. Cached as long as it lives.

    If no path leads from the root to a leaf, its number stands in place of the path: `<leaf 3>`.
    """
    # JAX asks for the paths several times in each trace, and again in the next.
    cached = _paths.get(structure)
    if cached is not None:
        return cached
    first_paths: dict[int, str] = {}
    leaf_numbers = set(structure.leaf_numbers)
    for number, path in edges(structure.records, [((), structure.root)], structure.base):
        if number in leaf_numbers and number not in first_paths:
            first_paths[number] = jtu.keystr(path)
    paths = [first_paths.get(number, f"<leaf {number}>") for number in structure.leaf_numbers]
    return _paths.setdefault(structure, paths)


_paths: weakref.WeakKeyDictionary[Structure, list[str]] = weakref.WeakKeyDictionary()


def with_paths(leaves: Sequence[Any], paths: Sequence[str]) -> list[tuple[LeafPath, Any]]:
    """Pairs each path with its leaf, as JAX wants it from a flatten function with keys.

    Each whole path becomes one key entry, a `LeafPath`. So JAX's errors name the leaf by this path.
    """
    return list(zip(map(LeafPath, paths), leaves, strict=True))


# --- parameters and state ---------------------------------------------------------------------------------------------


class Roles(NamedTuple):
    """Roles of the leaves of a tree, which say whether an optimizer trains a leaf. See `Role` in `_node_types`.

    A leaf with the role "parameter" is trained; one with the role "state" or "optimizer state" is not. If its library
    says neither, it has the role "unsaid": it is trained, too, but the optimizer may warn about it.

    Attributes:
        of_leaves: number of a leaf → its role. A missing leaf is a parameter.
        unsaid: the numbers of the nodes of a class with the role "unsaid". Nodes below state are left out.
    """

    of_leaves: dict[int, Role]
    unsaid: Sequence[int]

    def is_state(self, number: int) -> bool:
        """Returns True if a leaf is state, of a model or of an optimizer. State is not trained."""
        return self.of_leaves.get(number) in STATE_ROLES


def roles_in(tree: FlatDag) -> Roles:
    """Finds the roles of all leaves. A leaf has the role that the nearest node above it with a role gives to it.

    There are two exceptions. Everything below state is state of the same kind. Of different roles at several paths, the
    strongest holds.

    Cost: a look at each record; if a class among them has roles, up to three visits of each.
    """
    of_leaves: dict[int, Role] = {}
    unsaid: set[int] = set()
    if not any(type(op) is Node and op.type.roles is not None for op, _ in tree.records):
        return Roles(of_leaves, ())
    # A shared record is visited once for each role that it has on some path, not once for each path.
    visited: set[tuple[int, Role]] = set()
    # Each entry is a record and the role that the nodes above give to it.
    stack: list[tuple[int, Role]] = [(tree.root, "parameter")]
    while stack:
        number, role = stack.pop()
        if (number, role) in visited:
            continue
        visited.add((number, role))
        op, children = tree.records[number]
        if op is LEAF:
            # Of the roles at several paths the strongest holds: a parameter somewhere is a parameter.
            earlier_role = of_leaves.get(number)
            if earlier_role is None or _STRENGTH[role] > _STRENGTH[earlier_role]:
                of_leaves[number] = role
        # `Update` and `Given` occur only in results of functions, and nobody asks for the roles in those.
        elif type(op) is Node:
            if op.type.roles == "unsaid" and role not in STATE_ROLES:
                unsaid.add(number)
            for child, role_by_node in zip(children, _roles_of_children(op, len(children)), strict=True):
                # Everything below state is state, whatever its own class says.
                stack.append((child, role if role in STATE_ROLES or role_by_node is None else role_by_node))
    return Roles(of_leaves, sorted(unsaid))


def _roles_of_children(node: Node, num_children: int) -> Sequence[Role | None]:
    """Returns the role that a node gives to each of its children. None for a child that keeps the role of the node."""
    # One role for all leaves below, or a function of the auxiliary data that returns one role for each child.
    roles = node.type.roles
    if not callable(roles):
        return [roles for _ in range(num_children)]
    roles_of_children = roles(node.aux.peek())
    return [None for _ in range(num_children)] if roles_of_children is None else roles_of_children


STATE_ROLES: tuple[Role, ...] = ("state", "optimizer state")
"""Roles of leaves that are not trained."""

_STRENGTH: dict[Role, int] = {"parameter": 3, "unsaid": 2, "state": 1, "optimizer state": 0}
"""Role → its strength. If a leaf has different roles at several paths, the one with the largest number holds."""
