"""The table of all kinds of node, and functions that read it: children, steps, text, and bounds of any node.

A node is a JSON list of its kind and its operands, such as `["dict", ["a", "b"], [3, 4]]`. A child is either an *atom*,
a value that is written in place (`"a"`), or the number of an earlier node (`3`). So `type(child) is int` asks whether a
child is a node: whole numbers of a model are atoms too, `["int", "7"]`.

To add a kind, add one row to `_kinds_of_values.py`, and count `FORMAT` up. Nothing else in the package changes. A test
compares the table with the one in `docs/format_manifest.md`.

A few functions find the first node with some fault, for files that are written and for files that are read. They are
called `first_...`, and return the number of the node, or None.

**Walked children.** Some children are hashed, described by a treedef, or passed to an unflatten function as auxiliary
data. These are called walked children (`is_walked` of their operand), because Python or JAX walks everything below
them. The aux data of a registered class and the keys of a dict are examples.

An *unsafe object* must not be a walked child or below one. It is an object of Flax NNX or a `sharedtree.Module`. A file
chooses what such an object answers: a variable of NNX has every name in its metadata as an attribute, and the others
have all the attributes that a file gives them. So a file could give one an attribute `keys`, and an unflatten function
that calls `dict(aux)` would call what the file put there.

A `Dag` packs its model only when it is used, for example when it is compared with a template. In a comparison, its
model counts as a walked child.

**Order of sets.** The order of a Python set varies from process to process, and the numbers of nodes with it. So
members are sorted by their contents. A member that is a node is sorted by a digest, in which the digests of its
children stand for the children:

    {"a", ("b", 1)}    →    "a" by its text, the tuple by the digest of ["tuple", ["b", ["int", "1"]]]

Members with the same digest, such as two objects without parts, keep their order.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...core._node_types import LIBRARIES
from ...tree._dag import Dag
from ._atoms import atom_text, is_nan
from ._kinds_of_values import ROWS
from ._nodes import MAX_STEP, TYPE, Child, Decomposition, Kind, Manifest, Node, Operand, Parts

KINDS: dict[str, Kind] = {kind.name: kind for kind in ROWS}
"""Name of a kind → its row."""

MAX_NESTED = 1_000
"""Most levels of nesting below a walked child, and most nodes on one path whose kinds are not `is_deep`.

In both cases, Python or JAX recurses in C.
"""

MAX_HASHED = 1_000_000
"""Most nodes and atoms below all walked children, beyond the number of nodes and atoms in the manifest.

Each counts once for each path that leads to it, because hashing a DAG takes a step for each path.
"""

MAX_PRINTED = 1_000
"""The bound instead of `MAX_HASHED` for keys, which a comparison with a template prints.

Printing takes longer than hashing: 0.5 ms for a node, by Equinox.
"""

# ---- Functions and sets that follow from the rows ----


def _default_take(kind: Kind) -> Callable[[Any], Decomposition]:
    """Returns a function that takes objects of a kind apart, for a kind whose row has no `take`.

    The function gets the attributes that the steps of the operands name. If the kind also has an operand `children`,
    which has no step, the function iterates over the object for that operand, which is the last one:

        slice(1, 9, 2)  → children 1, 9, 2       steps .start, .stop, .step    node ["slice", <1>, <9>, <2>]
        ("a", "b")      → children "a", "b"      steps [0], [1]                node ["tuple", ["a", "b"]]
    """
    name, steps = kind.name, [operand.step for operand in kind.operands if operand.type == "child"]
    attributes, has_items = [step[1:] for step in steps], len(steps) < len(kind.operands)

    # Tuples and lists have items and no attributes, and there are many of them.
    def take_items(obj: Any) -> Decomposition:
        return Decomposition(tuple(obj), [f"[{i}]" for i in range(len(obj))], lambda written: [name, written])

    def take(obj: Any) -> Decomposition:
        values, items = [getattr(obj, attribute) for attribute in attributes], tuple(obj) if has_items else ()
        count = len(values)

        def build(written: list[Any]) -> Node:
            return [name, *written[:count], written[count:]] if has_items else [name, *written]

        return Decomposition((*values, *items), [*steps, *[f"[{i}]" for i in range(len(items))]], build)

    return take_items if has_items and not steps else take


def _default_build(cls: type) -> Callable[[Parts, Node], Any]:
    """Returns a function that calls a class with the objects of all operands. Each operand is one child."""
    return lambda parts, node: cls(*parts.children(node[1:]))


def _walked(operands: Sequence[tuple[int, Operand]]) -> tuple[tuple[int, Operand], ...]:
    """Returns those of a kind's operands, each with its position, whose children are walked children."""
    return tuple([(i, operand) for i, operand in operands if operand.is_walked])


def _in_path_order(name: str, operands: Sequence[tuple[int, Operand]]) -> list[tuple[int, Operand]]:
    """Returns a kind's operands, each with its position, in the order of `steps`.

    The keys and values of a mapping come first, then its other operands, such as a default factory. For other kinds,
    the order is that of the row.
    """
    first_position = _NUMBER_OF_KEYS_OPERAND.get(name, 0)
    return sorted(operands, key=lambda operand: operand[0] < first_position)


TAKERS = {cls: kind.take or _default_take(kind) for kind in ROWS for cls in kind.types}
"""Class → function that takes its instances apart."""

_BUILDABLE = [kind for kind in ROWS if kind.build or kind.types]
BUILDERS = {kind.name: kind.build or _default_build(kind.types[0]) for kind in _BUILDABLE}
"""Kind → function that builds the object of a node. Arrays are not here: the caller of `decode` passes them in."""

TYPED = frozenset([kind.name for kind in ROWS if kind.operands[:1] == (TYPE,)])
"""The kinds whose first operand is an index into `types`."""

# Kind → its operands, each with its position in a node. Positions begin at 1, because the kind is the first entry.
_OPERANDS = {kind.name: tuple(enumerate(kind.operands, 1)) for kind in ROWS}
_WALKED_OPERANDS = {name: _walked(operands) for name, operands in _OPERANDS.items()}
# Kinds with keys, names of keywords, or members of sets: see `Kind.keyed`.
_KEYED = [(kind.name, kind.keyed, kind.operands) for kind in ROWS if kind.keyed]
# Kind of a mapping or set → position of the operand with its keys or members, which Python hashes. Partials are not
# here: the names of their keywords are keys as well, but they are only texts.
_NUMBER_OF_KEYS_OPERAND = {name: keyed for name, keyed, operands in _KEYED if operands[keyed - 1].is_walked}
_OPERANDS_IN_PATH_ORDER = {name: _in_path_order(name, operands) for name, operands in _OPERANDS.items()}
# Kinds whose nesting needs no bound.
_DEEP = frozenset([kind.name for kind in ROWS if kind.is_deep])

# ---- Children, steps and texts of a node ----


def operands(node: Node) -> Iterator[tuple[Operand, Any]]:
    """Yields pairs of an operand, as the row of the kind declares it, and its value in a node."""
    return zip(KINDS[node[0]].operands, node[1:], strict=True)


def children_of(node: Node) -> Iterator[Child]:
    """Yields the children of a node, from left to right."""
    return _children_in(node, _OPERANDS[node[0]])


def walked_children(node: Node) -> Iterator[Child]:
    """Yields the children of a node that Python, JAX or an unflatten function hashes or walks."""
    return _children_in(node, _WALKED_OPERANDS[node[0]])


def _children_in(node: Node, numbered_operands: Sequence[tuple[int, Operand]]) -> Iterator[Child]:
    """Yields the children in some operands of a node. Operands without children, such as texts, are skipped.

    Args:
        node: the node.
        numbered_operands: the operands, each with its position in the node.
    """
    for i, operand in numbered_operands:
        if operand.type == "children":
            yield from node[i]
        elif operand.type == "child":
            yield node[i]


def steps(manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """Yields the children of a node, each with its step in a path, written as in Python where possible.

    The keys of a mapping come before its values, with the step `<key>`. Steps are made one at a time, so that a caller
    who looks for one child need not make the texts of all.
    """
    kind = KINDS[node[0]]
    return _default_steps(kind, manifest, node) if kind.steps is None else kind.steps(manifest, node)


def _default_steps(kind: Kind, manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """Yields the children of a node with their steps, which follow from the operands in the row of its kind.

    Examples of nodes and the steps of their children:

        ["slice", <1>, <9>, <2>]         .start, .stop, .step
        ["list", [3, 4]]                 [0], [1]
        ["dict", ["a", "b"], [3, 4]]     <key>, <key>, ['a'], ['b']
    """
    for i, operand in _OPERANDS_IN_PATH_ORDER[node[0]]:
        if operand.type == "child":
            yield node[i], operand.step
        elif operand.type == "children":
            for number, child in enumerate(node[i]):
                # The operand after the keys has the values of a mapping. The key of a value is at the same position.
                if kind.keyed is not None and i == kind.keyed + 1:
                    yield child, f"[{_key_text(manifest, node[i - 1][number])}]"
                # An item, or a member of a set. A set has its members in the `keyed` operand, which is also the last
                # one.
                elif i != kind.keyed or i == len(kind.operands):
                    yield child, f"[{number}]"
                # A key of a mapping. The names of a partial's keywords are `keyed` too, but not yielded: they are
                # texts.
                elif operand.is_walked:
                    yield child, "<key>"


def _key_text(manifest: Manifest, key: Child) -> str:
    """Returns a key of a mapping as text. A long text is cut, because every path below the key repeats it."""
    return node_text(manifest, manifest.nodes[key]) if type(key) is int else atom_text(key, MAX_STEP)


_MAX_INLINE, _MAX_LINE = 16, 80
"""Most children of a node that is shown on one line, and most characters of that line."""


def inline_text(manifest: Manifest, node: Node) -> str | None:
    """Returns a node as text on one line, such as `(2, 3)`.

    The row of its kind has a function for this, or the brackets around the children, or None (`Kind.inline`).

    Returns:
        None if the row has None. With brackets, also if a child is a node, which could be tied, if there are more than
        16 children, or if the text is too long. A function may return None, too.
    """
    inline = KINDS[node[0]].inline
    if inline is None or callable(inline):
        return inline and inline(manifest, node)
    # No more are listed than are needed, because a file may refer to one node with many children any number of times.
    children = list(itertools.islice(children_of(node), _MAX_INLINE + 1))
    if len(children) > _MAX_INLINE or any(type(child) is int for child in children):
        return None
    # As Python prints them: an empty frozenset is `frozenset()`, and a tuple of one item has a comma, `(1,)`.
    opening, closing = inline if children or node[0] != "frozenset" else ("frozenset(", ")")
    comma = "," if node[0] == "tuple" and len(children) == 1 else ""
    text = opening + ", ".join(map(atom_text, children)) + comma + closing
    return text if len(text) <= _MAX_LINE else None


def node_text(manifest: Manifest, node: Node) -> str:
    """Returns a description of a node in a few words, such as "empty list", "(2, 3)" or "dict".

    It is the result of the function in the row of its kind, or else the node as text on one line, or else the name of
    its kind.
    """
    kind = KINDS[node[0]]
    if kind.text is not None:
        return kind.text(manifest, node)
    # A collection with identity, such as a list, whose first operand has no children. An empty dict has no keys there.
    is_empty = kind.has_identity and kind.operands and kind.operands[0].type == "children" and not node[1]
    return inline_text(manifest, node) or (f"empty {kind.name}" if is_empty else kind.name)


# ---- Bounds, for files that are written as for files that are read ----


def first_beyond_bounds(
    nodes: Sequence[Node],
    walked_children: Callable[[Node], Iterable[Child]] = walked_children,
    max_extra: int = MAX_HASHED,
) -> int | None:
    """Returns the number of the first node that is nested too deeply, or below which too much is hashed or walked.

    Python and JAX walk some values with recursion in C, and hash a DAG in a time that grows with the number of its
    paths. Without bounds, a file could make them crash or run for ever.

    Args:
        nodes: all nodes. Children stand before their parents.
        walked_children: returns the children of a node that are hashed or walked.
        max_extra: most nodes and atoms below all walked children together, beyond the number of nodes and atoms in
            `nodes`. Each counts once for each path that leads to it.

    Returns:
        None if no node is beyond the bounds.
    """
    # Most files need no closer look: no node is hashed or walked, and the nodes whose nesting has a bound are so few
    # that they could not exceed it.
    has_walked_nodes = any(type(child) is int for node in nodes for child in walked_children(node))
    if not has_walked_nodes and sum(node[0] not in _DEEP for node in nodes) <= MAX_NESTED:
        return None
    # For each node: the number of its levels, and the most nodes on one path that are not `is_deep`. Last, the number
    # of nodes and atoms in it, each counted once for each path.
    depths, num_shallow, sizes = [0] * len(nodes), [0] * len(nodes), [0] * len(nodes)
    # For each node, itself and its atoms, without the nodes below.
    node_sizes = [1 + sum([_atom_size(child) for child in children_of(node)]) for node in nodes]
    max_walked = max_extra + sum(node_sizes)
    num_walked = 0
    for i, node in enumerate(nodes):
        child_nodes = [child for child in children_of(node) if type(child) is int]
        depths[i] = 1 + max([depths[child] for child in child_nodes], default=0)
        num_shallow[i] = (node[0] not in _DEEP) + max([num_shallow[child] for child in child_nodes], default=0)
        # A size can double with each level. Beyond the bound its value does not matter, so it is cut and stays small.
        sizes[i] = min(node_sizes[i] + sum([sizes[child] for child in child_nodes]), max_walked + 1)
        walked_nodes = [child for child in walked_children(node) if type(child) is int]
        num_walked += sum([sizes[child] for child in walked_nodes])
        is_too_deep = num_shallow[i] > MAX_NESTED
        if is_too_deep or num_walked > max_walked or any(depths[child] > MAX_NESTED for child in walked_nodes):
            return i
    return None


def _atom_size(child: Child) -> int:
    """Returns the size of a child that is an atom: 1, or more if it is long. 0 for a child that is a node.

    The size is in proportion to the time of hashing the value. Python hashes a long number anew each time.
    """
    if type(child) is list:
        return 1 + sum(map(len, child)) // 16
    # A bool, which counts as 0 or 1.
    return type(child) is not int


def first_with_nan_key(nodes: Sequence[Node]) -> int | None:
    """Returns the number of the first mapping or set with a NaN as a key or member, or in one, such as `(1, nan)`.

    A NaN is not equal to itself. So a dict finds a key with a NaN only by the same object, and a loaded file would have
    another object.

    Returns:
        None if there is no such node.
    """
    keys_by_node: dict[int, Sequence[Any]] = {}
    for i, node in enumerate(nodes):
        position = _NUMBER_OF_KEYS_OPERAND.get(node[0])
        if position is not None:
            keys_by_node[i] = node[position]
    # Most files have no NaN and no node among the keys, and need no walk over all nodes.
    if not any(type(key) is int or is_nan(key) for keys in keys_by_node.values() for key in keys):
        return None
    # For each node, whether a NaN is in it or in a node below it.
    holds_nan: list[bool] = []
    for i, node in enumerate(nodes):
        if any(holds_nan[key] if type(key) is int else is_nan(key) for key in keys_by_node.get(i, ())):
            return i
        holds_nan.append(any(holds_nan[child] if type(child) is int else is_nan(child) for child in children_of(node)))
    return None


def keys_of(node: Node) -> Sequence[Child]:
    """Returns the keys of a mapping or the members of a set. Returns an empty sequence for other nodes."""
    return node[_NUMBER_OF_KEYS_OPERAND[node[0]]] if node[0] in _NUMBER_OF_KEYS_OPERAND else ()


def num_keys(nodes: Sequence[Node]) -> int:
    """Returns the number of keys of all mappings, plus the number of members of all sets."""
    return sum(map(len, map(keys_of, nodes)))


def key_sizes(nodes: Sequence[Node]) -> dict[int, int]:
    """Returns a dict: number of a mapping or set → size of its largest key or member that is a node, such as a tuple.

    The size of a key is the number of nodes and atoms in it, each counted once for each path to it. Mappings and sets
    whose keys are all atoms are absent. Python may compare two keys with the same hash part by part, which takes time
    in proportion to their size.
    """
    mappings = [(i, keys_of(node)) for i, node in enumerate(nodes) if node[0] in _NUMBER_OF_KEYS_OPERAND]
    node_keys: dict[int, list[int]] = {}
    for i, keys in mappings:
        if child_nodes := [key for key in keys if type(key) is int]:
            node_keys[i] = child_nodes
    # Sizes of all nodes are counted only if some key is a node.
    sizes: list[int] = []
    for node in nodes if node_keys else ():
        parts = [sizes[child] if type(child) is int else _atom_size(child) for child in children_of(node)]
        sizes.append(min(1 + sum(parts), MAX_HASHED))
    return {i: max([sizes[key] for key in keys]) for i, keys in node_keys.items()}


def first_with_unsafe_object(nodes: Sequence[Node], classes: Sequence[Any]) -> int | None:
    """Returns the number of the first node with an unsafe object among its walked children or anywhere below these.

    Unsafe are objects of Flax NNX and `Module`s, because a file chooses their attributes: see the head of this file.

    Args:
        nodes: all nodes of a manifest.
        classes: the class of each of its types.

    Returns:
        None if there is no such node.
    """
    # For each type, whether its instances are unsafe. `has_arbitrary_attributes` of a library is True for a class whose
    # instances may return, for any attribute, what a file put into them.
    are_unsafe = [any(library.has_arbitrary_attributes(cls) for library in LIBRARIES) for cls in classes]
    if not any(are_unsafe):
        return None
    # For each node, whether it or a node below it is an unsafe object.
    holds_unsafe = [False] * len(nodes)
    for i, node in enumerate(nodes):
        if any(type(child) is int and holds_unsafe[child] for child in walked_children(node)):
            return i
        is_unsafe = node[0] in TYPED and are_unsafe[node[1]]
        holds_unsafe[i] = is_unsafe or any(type(child) is int and holds_unsafe[child] for child in children_of(node))
    return None


def walked_children_in_comparison(classes: Sequence[Any]) -> Callable[[Node], Iterable[Child]]:
    """Returns the function that takes the place of `walked_children` where a file is compared with a template.

    For a `Dag`, the function returns its model, because the comparison packs it. For other nodes, it does the same as
    `walked_children`.

    Args:
        classes: the class of each type of the manifest.
    """
    are_dags = [cls is Dag for cls in classes]
    return lambda node: node[3] if node[0] == "registered" and are_dags[node[1]] else walked_children(node)


# ---- Digests, by which members of sets are sorted ----

_SET_KINDS = ("set", "frozenset")


def extend_digests(digests: list[str], nodes: Sequence[Node], types: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Appends the digests of the nodes that have none yet. A digest does not depend on how nodes are numbered.

    Args:
        digests: digests of the first nodes, in order. The digests of the other nodes are appended.
        nodes: all nodes. Children stand before their parents.
        types: entries of `types` in the manifest.
        arrays: entries of `arrays` in the manifest. The name of a tensor is not part of the digest.
    """
    for node in nodes[len(digests) :]:
        contents: list[Any] = [node[0]]
        for operand, value in operands(node):
            if operand.type == "child":
                contents.append(_child_digest(value, digests))
            elif operand.type == "children":
                child_digests = [_child_digest(child, digests) for child in value]
                contents.append(sorted(child_digests) if node[0] in _SET_KINDS else child_digests)
            elif operand.type == "type":
                contents.append(types[value])
            elif operand.type == "array":
                contents.append({key: entry for key, entry in arrays[value].items() if key != "tensor"})
            else:
                contents.append(value)
        digests.append(hashlib.blake2b(json.dumps(contents).encode(), digest_size=16).hexdigest())


def _child_digest(child: Child, digests: Sequence[str]) -> str:
    """Returns a text that stands for a child in the digest of its parent: a node's own digest, or an atom as JSON."""
    return f"node {digests[child]}" if type(child) is int else json.dumps(child)
