"""Nodes: what a manifest holds, and what there is to know of each kind of them.

A node is a JSON list: its kind, then its operands. All that is known of a kind is one row, a `Kind`:

    Kind("slice", (child(".start"), child(".stop"), child(".step")), (slice,))

By this row the encoder takes slices apart, the parser knows what may stand where, the decoder builds them, paths lead
to `.start`, the outline prints them, and the bounds on what is nested are kept. `_all_kinds_of_nodes.py` has the table.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..arrays._placing import ArrayEntry

Child = int | str | bool | list[str] | None
"""The index of an earlier node, or an atom."""

Node = list[Any]

MAX_NAME = 1_000
"""How many characters the name of a class, function, method or field may have: it is shown wherever it is used."""

MAX_STEP = 400
"""How many characters a step may have: paths are made of them."""

MAX_COLLIDING = 100
"""How many keys of one dict, or members of one set, may have one hash."""

MAX_COLLISIONS = 50_000
"""How many pairs of keys of one dict, or members of one set, may have one hash in all of a file, beyond the number of
its keys and members: each pair may be compared. A pair counts as often as the largest of the keys has parts."""


class TypeEntry(NamedTuple):
    """One entry of `types`."""

    name: str
    kind: str
    fields: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    version: int = 0


class Manifest(NamedTuple):
    """A manifest that was found to follow the grammar.

    Attributes:
        library: who wrote it.
        types: the classes of instances.
        arrays: what is said of each array.
        nodes: each is the list that JSON gave.
        root: the tree.
        atoms: the value of each atom that names nothing, by its texts.
        names: the names of classes, functions and methods that the file asks for, each with what it is used as.
        main: the module that was the running program when the file was written, if any of the names is in that.
    """

    library: str
    types: tuple[TypeEntry, ...]
    arrays: tuple[ArrayEntry, ...]
    nodes: list[Node]
    root: Child
    atoms: dict[tuple[str, ...], Any]
    names: tuple[tuple[str, str], ...]
    main: str | None = None


class Operand(NamedTuple):
    """What stands in one place of a node.

    Attributes:
        type: `child`, an atom or the index of an earlier node; `children`, a list of those; `steps`, texts that lead
            to children; `type`, an index into `types`; `array`, into `arrays`; `text`; `base64`; `sizes`; `flag`.
        step: what leads to a child in a path. One of several is led to by its number.
        forms: what children may be, where not all may: `null`, `text`, the tag of an atom, or the kind of a node. What
            builds an object of any others would print them in its error, and a DAG of 2^60 paths takes for ever.
        is_walked: whether children are hashed, or walked as trees, by Python, by JAX, or by an unflatten function.
    """

    type: Literal["child", "children", "steps", "type", "array", "text", "base64", "sizes", "flag"]
    step: str = ""
    forms: frozenset[str] | None = None
    is_walked: bool = False


def child(step: str, *forms: str, is_walked: bool = False) -> Operand:
    """A place of one child."""
    return Operand("child", step, frozenset(forms) or None, is_walked)


def children(*forms: str, is_walked: bool = False) -> Operand:
    """A place of a list of children."""
    return Operand("children", "", frozenset(forms) or None, is_walked)


TEXT, TYPE, SIZES = Operand("text"), Operand("type"), Operand("sizes")


class Apart(NamedTuple):
    """An object taken apart.

    Attributes:
        children: what it holds. What JAX traces comes first and in JAX's order, so that the path under which an object
            is met first is the one that `jax.tree_util` prints first.
        keys: what leads to each child, in a path.
        build: the children as they are written → the node.
        hashed: the keys or members, of which few may have one hash.
    """

    children: Sequence[Any]
    keys: Sequence[str]
    build: Callable[[list[Any]], Node]
    hashed: Sequence[Any] = ()


class Kind(NamedTuple):
    """All that there is to know of a kind of node.

    Attributes:
        name: what its nodes begin with.
        operands: what follows.
        types: the classes whose instances are such nodes, if that is all there is to say.
        take: takes an instance apart. Default: the attributes that the steps of the operands name, or its items.
        build: makes the object, its children being built already. It may raise what a constructor raises at nonsense.
            Default: the first of `types`, called with what the operands hold.
        steps: the children of a node, each with what leads to it. Default: what the operands say.
        text: what a node is, in a few words. Default: its kind.
        inline: a node as one line, if it holds nothing that could be tied; else None. Two texts: what stands around it.
        keyed: the operand that has the keys of a mapping, whose values are in the next one; or the members of a set.
        paired: another operand that must be as long as the next one.
        is_deep: whether it may be nested without end: Python frees it without recursion.
        has_identity: whether two occurrences are a tie.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    types: tuple[type, ...] = ()
    take: Callable[[Any], Apart] | None = None
    build: "Callable[[Parts, Node], Any] | None" = None
    steps: Callable[[Manifest, Node], Iterator[tuple[Child, str]]] | None = None
    text: Callable[[Manifest, Node], str] | None = None
    inline: Callable[[Manifest, Node], str | None] | tuple[str, str] | None = None
    keyed: int | None = None
    paired: int | None = None
    is_deep: bool = False
    has_identity: bool = False

    @property
    def first_of_pair(self) -> int | None:
        """The operand that must be as long as the next one, if there is one."""
        return self.paired or (self.keyed if self.keyed != len(self.operands) else None)


@dataclasses.dataclass(slots=True)
class Parts:
    """What there is to build from.

    Attributes:
        values: the value of each atom, by its texts.
        makers: for each type of the manifest, what makes an instance from the values of its fields, or the class.
        fields: for each type of the manifest, the names of its fields.
        collisions: of the keys of the nodes built so far.
        table: the objects of the nodes built so far.
    """

    values: dict[tuple[str, ...], Any]
    makers: Sequence[Any]
    fields: Sequence[tuple[str, ...]]
    collisions: "Collisions"
    table: list[Any] = dataclasses.field(default_factory=list[Any])

    def count(self, keys: Sequence[Any]) -> None:
        """Counts the keys or members of the node that is being built."""
        self.collisions.add(keys, len(self.table))

    def child(self, child: Any) -> Any:
        """The object of a child."""
        cls = type(child)
        if cls is int:
            return self.table[child]
        return self.values[tuple(child)] if cls is list else child

    def children(self, children: list[Any]) -> list[Any]:
        """The objects of several children."""
        table, values = self.table, self.values
        return [table[c] if type(c) is int else values[tuple(c)] if type(c) is list else c for c in children]


def require(condition: bool, what: str) -> None:
    """Raises an error that says why a node cannot be built."""
    if not condition:
        raise ValueError(what)


def step_of(name: str) -> str:
    """How a path continues to an attribute, as JAX prints it. Some objects are lists, with numbers for names."""
    return f"[{name}]" if name.isascii() and name.isdecimal() else f".{name}"


class Collisions:
    """Counts the keys of dicts and the members of sets, and how many pairs of them have one hash.

    A key is compared with all of its hash that were there before it. Hashes of numbers are no secret, so that a file
    could be made of such keys.

    Args:
        most: how many pairs there may be. Default: any number, until somebody asks `are_too_many`.
        sizes: of the largest key of the nodes by number, where that is more than one.
    """

    def __init__(self, most: int | None = None, sizes: Mapping[int, int] | None = None) -> None:
        self._most, self._sizes = most, {} if sizes is None else sizes
        self._keys = self._pairs = 0

    def add(self, keys: Sequence[Any], number: int = -1) -> None:
        """Counts the keys of one dict or the members of one set, of the node of a number.

        Raises `ValueError` if too many have one hash.
        """
        hashes = list(map(hash, keys))
        self._keys += len(hashes)
        self._count(hashes, self._sizes.get(number, 1))
        if self._most is not None and self._pairs > self._most:
            raise ValueError("in all of the file, too many keys have one hash")

    def add_size(self, keys: Sequence[Any], size: int) -> None:
        """Says of keys that were counted how large the largest of them is."""
        self._count(list(map(hash, keys)), size - 1)

    def _count(self, hashes: list[int], size: int) -> None:
        if len(set(hashes)) == len(hashes):
            return
        counts = Counter(hashes).values()
        if max(counts) > MAX_COLLIDING:
            raise ValueError(f"more than {MAX_COLLIDING} keys have one hash")
        self._pairs += size * sum([count * (count - 1) // 2 for count in counts])

    def are_too_many(self) -> bool:
        """Whether no reader would take as many pairs for so many keys."""
        return self._pairs > most_collisions(self._keys)


def most_collisions(num_keys: int) -> int:
    """How many pairs of one hash so many keys and members may have."""
    return MAX_COLLISIONS + num_keys
