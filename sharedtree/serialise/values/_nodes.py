"""Types of the parts of a manifest, and `Kind`, which describes one kind of node.

A node is a JSON list: its kind, then its operands. One row, a `Kind`, describes all nodes of a kind:

    Kind("slice", (child(".start"), child(".stop"), child(".step")), (slice,))

By this row the encoder takes slices apart, the parser checks their operands, the decoder builds them, paths lead to
`.start`, the outline prints them, and nesting is bounded. `_all_kinds_of_nodes.py` has the table of all rows.

Words: an *atom* is a value that is written in place: `None`, a boolean, a string, or a list of texts whose first is the
*tag*, such as `["int", "7"]`. A *step* is the part of a path that leads to a child, such as `.start` or `[0]`. Two keys
*collide* if they are in one dict or set and have the same hash.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..arrays._placing import ArrayEntry

Child = int | str | bool | list[str] | None
"""The number of an earlier node, or an atom: a value that is written in place.

A number is always that of a node, because whole numbers of a model are atoms of the form `["int", "7"]`.
"""

Node = list[Any]
"""A kind and its operands, as JSON has them."""

MAX_NAME = 1_000
"""Most characters in the name of a class, function, method or field. The name is shown wherever it is used."""

MAX_STEP = 400
"""Most characters in a step. Paths are made of steps."""

MAX_COLLIDING = 100
"""Most keys of one dict, or members of one set, with the same hash."""

MAX_COLLISIONS = 50_000
"""Most pairs of colliding keys in a whole file, beyond the number of its keys and members.

Python may compare the keys of each pair, part by part. So a pair counts as many times as the largest key of its dict or
set has parts.
"""


class TypeEntry(NamedTuple):
    """One entry of `types`: a class, and the attributes of its instances.

    Attributes:
        name: `module:qualname` of the class.
        kind: how its instances are rebuilt, such as `module`, `dataclass` or `enum`.
        fields: declared fields, in the order of the values in nodes.
        missing: declared fields without a value in these instances. They are not among `fields`.
        extra: undeclared attributes. In a node, their values follow the values of `fields`.
        version: `__sharedtree_version__` of the class when the file was written.
    """

    name: str
    kind: str
    fields: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    version: int = 0


class Manifest(NamedTuple):
    """A manifest in accord with the grammar.

    Attributes:
        library: the library that wrote it, with its version.
        types: the classes of instances.
        arrays: an entry for each array, with its tensor, dtype and shape.
        nodes: the nodes. Children stand before their parents.
        root: the child for the whole tree: the number of a node, or an atom.
        atoms: texts of an atom → its value, such as ("int", "7") → 7. Atoms that name a class or function are not here.
        names: a pair for each name in the file, such as ("class", "net:Net"). The first text is `class`,
            `function` or `method`.
        main: module name of the program that wrote the file. None if the file names nothing in this module.
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
    """One operand of a kind of node, as its row declares it.

    Attributes:
        type: `child` is an atom or the number of an earlier node, and `children` a list of such values. `steps` is a
            list of texts, the steps to children. `type` is an index into `types`, and `array` an index into `arrays`.
            Others are plain JSON: `text` and `base64` are strings, `sizes` whole numbers in a list, `flag` a boolean.
        step: the step of a path to a `child`. Empty for `children`: their steps are positions in the list.
        forms: the forms allowed for children: `null`, `text`, the tag of an atom, or the kind of a node. None if all
            are allowed. Some constructors print a wrong argument in their error, and printing a DAG with 2^60 paths
            never ends. So wrong forms are refused before the constructor is called.
        is_walked: True if Python, JAX or an unflatten function hashes the children or walks them as trees.
    """

    type: Literal["child", "children", "steps", "type", "array", "text", "base64", "sizes", "flag"]
    step: str = ""
    forms: frozenset[str] | None = None
    is_walked: bool = False


def child(step: str, *forms: str, is_walked: bool = False) -> Operand:
    """Declares an operand of one child, reached by a step. Without `forms`, the child may have any form."""
    return Operand("child", step, frozenset(forms) or None, is_walked)


def children(*forms: str, is_walked: bool = False) -> Operand:
    """Declares an operand of a list of children. Without `forms`, the children may have any form."""
    return Operand("children", "", frozenset(forms) or None, is_walked)


TEXT, TYPE, SIZES = Operand("text"), Operand("type"), Operand("sizes")


class Decomposition(NamedTuple):
    """An object, taken apart into its children.

    Attributes:
        children: the objects in it. Traced ones come first and in JAX's order, so the first path to a shared object is
            also the first one in `jax.tree_util`.
        steps: the step of a path to each child.
        build: makes the node from the list of the same children as numbers of nodes and atoms.
        keys: keys of a mapping or members of a set, also if they are among `children`. Their collisions are counted.
    """

    children: Sequence[Any]
    steps: Sequence[str]
    build: Callable[[list[Any]], Node]
    keys: Sequence[Any] = ()


class Kind(NamedTuple):
    """One kind of node: its grammar, and functions to take objects apart, to build them and to print them.

    Attributes:
        name: the first entry of its nodes.
        operands: the other entries.
        types: classes of which every instance becomes a node of this kind. Empty if the encoder decides otherwise.
        take: takes an instance apart. Default: gets the attributes named in the steps of the operands, and iterates
            over the instance for an operand `children`.
        build: makes the object of a node, once the objects of its children are made. It may raise anything, as
            constructors do for wrong arguments. Default: calls the first of `types` with the values of the operands.
        steps: yields the children of a node with their steps. Default: they follow from the operands.
        text: returns a description of a node in a few words. Default: the name of the kind.
        inline: returns a node as text on one line, or None if it does not fit or could contain a tie. Two texts are the
            brackets around the children. None: nodes of this kind are never shown on one line.
        keyed: position in a node of the operand with the members of a set, the keys of a mapping, or the names of a
            partial's keywords: `node[keyed]`. For all but sets, the next operand has the values.
        paired: position in a node of an operand without keys that must have as many entries as the next one.
        is_deep: True if nesting needs no bound, because Python frees such objects without recursion.
        has_identity: True if the object of a node has identity, so that two occurrences of the node are a tie.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    types: tuple[type, ...] = ()
    take: Callable[[Any], Decomposition] | None = None
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
        """Position in a node of the operand that must be as long as the next one. None if the node has no pair."""
        # `keyed` of a set is its last operand, and no values follow.
        return self.paired or (self.keyed if self.keyed != len(self.operands) else None)


@dataclasses.dataclass(slots=True)
class Parts:
    """Data for a row's `build` beside the node: atoms, makers of instances, and objects of earlier nodes.

    Attributes:
        values: texts of an atom → its value.
        makers: for each type of the manifest, a function from the values of its fields to an instance. For registered
            classes and enums, the class itself.
        fields: for each type of the manifest, the names of its fields.
        collisions: counter of colliding keys in all nodes so far.
        table: the objects of the nodes so far, by number.
    """

    values: dict[tuple[str, ...], Any]
    makers: Sequence[Any]
    fields: Sequence[tuple[str, ...]]
    collisions: "Collisions"
    table: list[Any] = dataclasses.field(default_factory=list[Any])

    def limit_collisions(self, keys: Sequence[Any]) -> None:
        """Counts collisions among the keys or members of the node now being built.

        It must be called before the keys are put into a dict or set, because that could take very long.

        Raises:
            ValueError: if too many keys of the node, or of all nodes so far, have the same hash.
        """
        # The number of the node is that of all nodes before it.
        self.collisions.add(keys, len(self.table))

    def child(self, child: Any) -> Any:
        """Returns the object meant by a child.

        It is the object of an earlier node, the value of an atom that is a list, or the child itself: a string, a
        boolean or None.
        """
        cls = type(child)
        if cls is int:
            return self.table[child]
        return self.values[tuple(child)] if cls is list else child

    def children(self, children: list[Any]) -> list[Any]:
        """Returns the objects meant by several children: see `child`."""
        table, values = self.table, self.values
        return [table[c] if type(c) is int else values[tuple(c)] if type(c) is list else c for c in children]


def require(condition: bool, reason: str) -> None:
    """Raises `ValueError` with the reason why a node cannot be built, unless the condition holds."""
    if not condition:
        raise ValueError(reason)


def are_sizes(sizes: Any) -> bool:
    """Returns True if a value is a list of sizes, such as the shape of an array: at most 64 whole numbers from 0 on.

    Each and their product have at most 63 bits, as in NumPy.
    """
    if type(sizes) is not list or len(sizes) > 64 or not all(type(size) is int for size in sizes):
        return False
    return all(0 <= size < 2**63 for size in sizes) and math.prod(sizes) < 2**63


def step_of(name: str) -> str:
    """Returns the step of a path to an attribute, as JAX prints it. Attributes of NNX lists have numbers as names."""
    return f"[{name}]" if name.isascii() and name.isdecimal() else f".{name}"


# ---- Bounds: colliding keys ----


def require_few_collisions(keys: Iterable[Any]) -> None:
    """Raises `ValueError` if more than `MAX_COLLIDING` of some values, which are to be put into a set, have one hash.

    It is for the keys of nodes that are no mapping and no set, such as the ids of a mesh. There is no bound for all of
    these nodes together.
    """
    if max(Counter(map(hash, keys)).values(), default=0) > MAX_COLLIDING:
        raise ValueError(f"more than {MAX_COLLIDING} keys have one hash")


class Collisions:
    """Counts the keys of dicts and the members of sets, and the pairs of colliding ones.

    Python compares a new key with every earlier key of the same hash. Hashes of numbers can be predicted, so a file
    could be made of colliding keys that take quadratic time.

    Args:
        max_pairs: number of pairs beyond which `add` raises. With None, all pairs are counted, and `are_too_many` tells
            at the end.
        key_sizes: number of a node → number of parts of its largest key. Nodes with keys of one part may be absent.
    """

    def __init__(self, max_pairs: int | None = None, key_sizes: Mapping[int, int] | None = None) -> None:
        self._max_pairs, self._key_sizes = max_pairs, {} if key_sizes is None else key_sizes
        self._num_keys = self._num_pairs = 0

    def add(self, keys: Sequence[Any], number: int = -1) -> None:
        """Counts the keys of one dict or the members of one set.

        Args:
            keys: the keys or members. Each is hashed once.
            number: number of the node, for a look-up in `key_sizes`. Default: the keys count as keys of one part.

        Raises:
            ValueError: if more than `MAX_COLLIDING` of the keys have the same hash, or there are more than `max_pairs`
                pairs in all.
        """
        hashes = list(map(hash, keys))
        self._num_keys += len(hashes)
        self._count(hashes, self._key_sizes.get(number, 1))
        if self._max_pairs is not None and self._num_pairs > self._max_pairs:
            raise ValueError("in all of the file, too many keys have one hash")

    def correct_size(self, keys: Sequence[Any], size: int) -> None:
        """Corrects the count of keys counted by `add` as keys of one part, after their size is known.

        Args:
            keys: the same keys or members.
            size: number of parts of the largest of them.

        Raises:
            ValueError: if more than `MAX_COLLIDING` of the keys have the same hash.
        """
        self._count(list(map(hash, keys)), size - 1)

    def _count(self, hashes: list[int], size: int) -> None:
        """Adds the pairs of equal hashes, each `size` times.

        Raises:
            ValueError: if more than `MAX_COLLIDING` of the hashes are the same.
        """
        # Most dicts have no collision at all, which this cheap test shows.
        if len(set(hashes)) == len(hashes):
            return
        # How often each hash occurs. A hash that occurs n times makes n * (n - 1) / 2 pairs.
        counts = Counter(hashes).values()
        if max(counts) > MAX_COLLIDING:
            raise ValueError(f"more than {MAX_COLLIDING} keys have one hash")
        self._num_pairs += size * sum([count * (count - 1) // 2 for count in counts])

    def are_too_many(self) -> bool:
        """Returns True if there are too many pairs for a file with them to be loaded."""
        return self._num_pairs > most_collisions(self._num_keys)


def most_collisions(num_keys: int) -> int:
    """Returns the most pairs of colliding keys that a file with `num_keys` keys and members may have."""
    return MAX_COLLISIONS + num_keys
