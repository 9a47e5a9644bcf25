"""The table of all kinds of node, and what follows from it for any node: its children, its paths, its text, its bounds.

A new kind is one row in the file where its like are, `_kinds_of_values.py` for values of Python's. Nothing else of the
package changes but `FORMAT`. The table in `docs/format_manifest.md` is compared with this one by a test.

What is looked at while a file is loaded may be no object that answers as the file says. A variable of NNX answers to
every name that is in its metadata, and NNX's objects and `Module`s have whatever attributes a file says, `keys` among
them, which `dict(aux)` would call. So none of them may be what is hashed, what a treedef describes, or in the auxiliary
data that an unflatten function is given. A `Dag` takes its model apart only when somebody uses it; a comparison with a
template does. So beside a template its model is bounded as what is hashed is.

The members of a set are written in an order that depends on what they are: Python's own varies from process to process,
and with it the numbers of the nodes. A member that is no atom is told by a digest of what it would be written as, in
which a child that is a node stands by its own digest:

    {"a", ("b", 1)}    →    "a" by its text, the tuple by the digest of ["tuple", ["b", ["int", "1"]]]

Members that are written alike, such as two objects that are equal only to themselves, keep the order in which they
come.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...core._node_types import LIBRARIES
from ...tree._dag import Dag
from . import _kinds_of_instances, _kinds_of_jax_values, _kinds_of_values
from ._atoms import atom_text, is_nan
from ._nodes import MAX_STEP, TYPE, Apart, Child, Kind, Manifest, Node, Operand, Parts

_ROWS = (*_kinds_of_values.KINDS, *_kinds_of_instances.KINDS, *_kinds_of_jax_values.KINDS)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ROWS}

MAX_NESTED = 1_000
"""How deep what is hashed or described as a treedef may be nested, and how many nodes that are not `is_deep` may lie
on one path: Python and JAX walk those with recursion in C."""

MAX_HASHED = 1_000_000
"""How many nodes and values all of that may have, beyond those of the manifest, when each is counted as often as it
occurs: hashing a DAG, and describing it, takes that long."""

MAX_PRINTED = 1_000
"""The same for keys where they are printed, as beside a template: Equinox takes half a millisecond a node."""


def _take(kind: Kind) -> Callable[[Any], Apart]:
    """Takes the attributes that the steps name, and what iterating gives, if the last operand is for several."""
    name, steps = kind.name, [operand.step for operand in kind.operands if operand.type == "child"]
    attributes, has_items = [step[1:] for step in steps], len(steps) < len(kind.operands)

    def take_items(obj: Any) -> Apart:
        return Apart(tuple(obj), [f"[{i}]" for i in range(len(obj))], lambda done: [name, done])

    def take(obj: Any) -> Apart:
        single, items = [getattr(obj, attribute) for attribute in attributes], tuple(obj) if has_items else ()
        count = len(single)

        def build(done: list[Any]) -> Node:
            return [name, *done[:count], done[count:]] if has_items else [name, *done]

        return Apart((*single, *items), [*steps, *[f"[{i}]" for i in range(len(items))]], build)

    return take_items if has_items and not steps else take


def _build(cls: type) -> Callable[[Parts, Node], Any]:
    return lambda parts, node: cls(*parts.children(node[1:]))


TAKERS = {cls: kind.take or _take(kind) for kind in _ROWS for cls in kind.types}
"""How the instances of each class come apart."""

BUILDERS = {kind.name: kind.build or _build(kind.types[0]) for kind in _ROWS if kind.build or kind.types}
"""How nodes of each kind are built; but for arrays."""

TYPED = frozenset([kind.name for kind in _ROWS if kind.operands[:1] == (TYPE,)])
"""The kinds whose nodes are instances of one of the types."""

_OPERANDS = {kind.name: tuple(enumerate(kind.operands, 1)) for kind in _ROWS}
_WALKED = {kind.name: tuple([(i, each) for i, each in _OPERANDS[kind.name] if each.is_walked]) for kind in _ROWS}
_HASHED = {kind.name: kind.keyed for kind in _ROWS if kind.keyed and kind.operands[kind.keyed - 1].is_walked}
# The keys and values of a mapping come first, whatever else it has.
_IN_ORDER = {
    kind.name: sorted(_OPERANDS[kind.name], key=lambda place: place[0] < _HASHED.get(kind.name, 0)) for kind in _ROWS
}
_DEEP = frozenset([kind.name for kind in _ROWS if kind.is_deep])


def operands(node: Node) -> Iterator[tuple[Operand, Any]]:
    """The operands of a node, each with what it is."""
    return zip(KINDS[node[0]].operands, node[1:], strict=True)


def children_of(node: Node) -> Iterator[Child]:
    """The children of a node, from left to right."""
    return _those_of(node, _OPERANDS[node[0]])


def walked_of(node: Node) -> Iterator[Child]:
    """The children of a node that Python, JAX or an unflatten function hashes or walks."""
    return _those_of(node, _WALKED[node[0]])


def _those_of(node: Node, places: Sequence[tuple[int, Operand]]) -> Iterator[Child]:
    for i, operand in places:
        if operand.type == "children":
            yield from node[i]
        elif operand.type == "child":
            yield node[i]


def steps(manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """The children of a node, each with what leads to it, as Python would write it where it can.

    The keys of mappings come before the values, as `<key>`. Nothing is made before it is asked for: what lies on the
    path to a node may have many children each.
    """
    kind = KINDS[node[0]]
    return _steps(kind, manifest, node) if kind.steps is None else kind.steps(manifest, node)


def _steps(kind: Kind, manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    for i, operand in _IN_ORDER[node[0]]:
        if operand.type == "child":
            yield node[i], operand.step
        elif operand.type == "children":
            for number, each in enumerate(node[i]):
                if kind.keyed is not None and i == kind.keyed + 1:
                    yield each, f"[{_key_text(manifest, node[i - 1][number])}]"
                elif i != kind.keyed or i == len(kind.operands):
                    yield each, f"[{number}]"
                elif operand.is_walked:  # others are texts, which hold nothing
                    yield each, "<key>"


def _key_text(manifest: Manifest, key: Child) -> str:
    # Of a longer key, the paths below it would fill the memory.
    return node_text(manifest, manifest.nodes[key]) if type(key) is int else atom_text(key, MAX_STEP)


_MAX_INLINE, _MAX_LINE = 16, 80


def inline_text(manifest: Manifest, node: Node) -> str | None:
    """A value that fits on a line and holds nothing that could be tied; None of any other node."""
    inline = KINDS[node[0]].inline
    if inline is None or callable(inline):
        return inline and inline(manifest, node)
    held = list(children_of(node))
    if len(held) > _MAX_INLINE or any(type(child) is int for child in held):
        return None
    opening, closing = inline if held or node[0] != "frozenset" else ("frozenset(", ")")
    comma = "," if node[0] == "tuple" and len(held) == 1 else ""
    text = opening + ", ".join(map(atom_text, held)) + comma + closing
    return text if len(text) <= _MAX_LINE else None


def node_text(manifest: Manifest, node: Node) -> str:
    """What a node is, in a few words."""
    kind = KINDS[node[0]]
    if kind.text is not None:
        return kind.text(manifest, node)
    is_empty = kind.has_identity and kind.operands and kind.operands[0].type == "children" and not node[1]
    return inline_text(manifest, node) or (f"empty {kind.name}" if is_empty else kind.name)


def nested_too_deeply(
    nodes: Sequence[Node], walked_of: Callable[[Node], Iterable[Child]] = walked_of, beyond: int = MAX_HASHED
) -> int | None:
    """The first node that is nested too deeply, or holds too much that is hashed or walked; None if none is.

    Python and JAX walk some things with recursion in C, and hash a DAG in a time that grows with its number of paths. A
    file could make them crash or run for ever, so there are bounds, for what is written as for what is read.
    """
    is_walked = any(type(child) is int for node in nodes for child in walked_of(node))
    if not is_walked and sum(node[0] not in _DEEP for node in nodes) <= MAX_NESTED:
        return None
    depths, shallow, sizes = [0] * len(nodes), [0] * len(nodes), [0] * len(nodes)
    own = [1 + sum([_weight(child) for child in children_of(node)]) for node in nodes]
    most = beyond + sum(own)
    walked_in_all = 0
    for i, node in enumerate(nodes):
        below = [child for child in children_of(node) if type(child) is int]
        depths[i] = 1 + max([depths[child] for child in below], default=0)
        shallow[i] = (node[0] not in _DEEP) + max([shallow[child] for child in below], default=0)
        sizes[i] = min(own[i] + sum([sizes[child] for child in below]), most + 1)
        walked = [child for child in walked_of(node) if type(child) is int]
        walked_in_all += sum([sizes[child] for child in walked])
        if shallow[i] > MAX_NESTED or walked_in_all > most or any(depths[child] > MAX_NESTED for child in walked):
            return i
    return None


def _weight(child: Child) -> int:
    """What an atom adds to the time of hashing; long numbers are hashed anew each time."""
    if type(child) is list:
        return 1 + sum(map(len, child)) // 16
    return type(child) is not int


def nan_among_keys(nodes: Sequence[Node]) -> int | None:
    """The first node that has a number as a key or a member that is not equal to itself, or holds one in it.

    Nobody finds it again, and whether two of them are one key depends on which are one object.
    """
    keys = {i: node[_HASHED[node[0]]] for i, node in enumerate(nodes) if node[0] in _HASHED}
    if not any(type(key) is int or is_nan(key) for each in keys.values() for key in each):
        return None
    holds: list[bool] = []
    for i, node in enumerate(nodes):
        if any(holds[key] if type(key) is int else is_nan(key) for key in keys.get(i, ())):
            return i
        holds.append(any(holds[child] if type(child) is int else is_nan(child) for child in children_of(node)))
    return None


def keys_of(node: Node) -> Sequence[Child]:
    """The keys of a mapping, which are printed in paths, or the members of a set."""
    return node[_HASHED[node[0]]] if node[0] in _HASHED else ()


def num_keys(nodes: Sequence[Node]) -> int:
    """How many keys the mappings of a file have, and members its sets."""
    return sum(map(len, map(keys_of, nodes)))


def key_sizes(nodes: Sequence[Node]) -> dict[int, int]:
    """How many parts the largest key has, of each node with keys that are nodes: comparing two of them takes as long.

    What is shared counts as often as it occurs.
    """
    mappings = [(i, keys_of(node)) for i, node in enumerate(nodes) if node[0] in _HASHED]
    keyed = {i: below for i, keys in mappings if (below := [key for key in keys if type(key) is int])}
    sizes: list[int] = []
    for node in nodes if keyed else ():
        parts = [sizes[child] if type(child) is int else _weight(child) for child in children_of(node)]
        sizes.append(min(1 + sum(parts), MAX_HASHED))
    return {i: max([sizes[key] for key in below]) for i, below in keyed.items()}


def first_touched(nodes: Sequence[Node], classes: Sequence[Any]) -> int | None:
    """The first node of a manifest that hashes, describes or hands on such an object, at whatever depth; None if none
    does. `classes` has the class of each type.
    """
    are_theirs = [any(library.answers_as_told(cls) for library in LIBRARIES) for cls in classes]
    if not any(are_theirs):
        return None
    holds = [False] * len(nodes)
    for i, node in enumerate(nodes):
        if any(type(child) is int and holds[child] for child in walked_of(node)):
            return i
        is_one = node[0] in TYPED and are_theirs[node[1]]
        holds[i] = is_one or any(type(child) is int and holds[child] for child in children_of(node))
    return None


def compared_of(classes: Sequence[Any]) -> Callable[[Node], Iterable[Child]]:
    """Gives the children of a node that are hashed or walked beside a template: those of each `Dag`, too."""
    are_dags = [cls is Dag for cls in classes]
    return lambda node: node[3] if node[0] == "registered" and are_dags[node[1]] else walked_of(node)


_SETS = ("set", "frozenset")


def extend_digests(digests: list[str], nodes: Sequence[Node], types: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Adds the digests of those nodes that have none yet. They do not depend on how nodes are numbered."""
    for node in nodes[len(digests) :]:  # children stand before their parents
        told: list[Any] = [node[0]]
        for operand, value in operands(node):
            if operand.type == "child":
                told.append(_told(value, digests))
            elif operand.type == "children":
                below = [_told(child, digests) for child in value]
                told.append(sorted(below) if node[0] in _SETS else below)
            elif operand.type == "type":
                told.append(types[value])
            elif operand.type == "array":
                told.append({key: about for key, about in arrays[value].items() if key != "tensor"})
            else:
                told.append(value)
        digests.append(hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest())


def _told(child: Child, digests: Sequence[str]) -> str:
    return f"node {digests[child]}" if type(child) is int else json.dumps(child)
