"""Prefix trees: `in_axes`, shardings, filter specifications.

    tree     {"a": w, "b": [w, v]}       prefix   {"a": 0, "b": None}       labels   w: 0   w: None   v: None

A prefix has the shape of a tree down to some depth. Its leaves are *labels*, which say how a transform treats the
leaves of the tree: an axis, for example. A label holds for all leaves below its place. In a DAG several paths may lead
to one leaf, and the prefix may have a different label on each. Callers decide what that means.

A *part* of a prefix is a label or a node in it, with all that is below.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jax import tree_util as jtu

from ._by_identity import IdentityDict
from ._errors import SharingMismatchError
from ._locks import Lock
from ._node_types import node_type_of
from ._sharing import Rooted, children_text, op_text
from ._static_values import Static, distinguishing_text
from ._structure import LEAF, Node, Path, Update


class Label(NamedTuple):
    """One label of one leaf of the tree.

    Attributes:
        record: the number of the record of the leaf.
        label: the label that the prefix has for it.
        path: the first path on which the leaf has this label.
        view_path: the path of the view on that path, if the leaf is also outside of views. Otherwise None. Of nested
            views it is the outermost.
    """

    record: int
    label: Any
    path: Path
    view_path: Path | None = None


class Branch:
    """A node in a prefix that sharedtree made itself. It fits any node of a tree with as many children as it has parts.

    Two branches are equal if their parts are. `branch_of` makes equal branches one object.

    Attributes:
        parts: one part of the prefix for each child of the node.
    """

    __slots__ = ("__weakref__", "_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash: int | None = None

    def __hash__(self) -> int:
        # The hash is stored. Otherwise a shared branch would be hashed once for each path to it: 2**60 times, if 60
        # branches form a chain in which each holds the next one twice.
        if self._hash is None:
            self._hash = hash((Branch, self.parts))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Branch and self.parts == other.parts)

    def __repr__(self) -> str:
        return f"Branch{self.parts!r}"


_branches: "weakref.WeakValueDictionary[tuple[Any, ...], Branch]" = weakref.WeakValueDictionary()
"""Parts → the branch with these parts, while it lives. Guarded by `_lock`."""

_lock = Lock()


def branch_of(parts: tuple[Any, ...]) -> Branch:
    """Returns the one branch with these parts. Makes it if none is alive.

    So equal branches are one object. To compare two tuples of parts, Python compares the items by `is` before it
    compares them by `==`. So if the items are branches from here, the comparison ends at the
    items, and looks at nothing below them.

    Args:
        parts: True, False, or branches that this function returned. Nothing else is allowed: the parts are hashed and
            compared under a lock, and an object of a user could run any code there.
    """
    with _lock:
        branch = _branches.get(parts)
        if branch is None:
            branch = _branches[parts] = Branch(parts)
        return branch


def labels(prefix: Any, tree: Rooted, is_label: Callable[[Any], bool], name: str, path: Path = ()) -> Iterator[Label]:
    """Yields the labels of a prefix for the traced and static leaves of a DAG.

        tree       {"a": w, "b": w, "c": [v, v]}
        prefix     {"a": 0, "b": 0, "c": spec}                       `spec` is one object
        labels     (w, 0, ["a"])   (w, 0, ["b"])   (v, spec, ["c"][0])

    The examples show the leaf itself in place of its record's number.

    A label may reach one leaf by several paths. It is yielded once for this leaf, with the first path. Two labels count
    as one label if they are one object. For numbers this means nothing, because Python shares small numbers. So a
    number is yielded for each edge to the leaf.

    A *view* is a node for a result computed from its leaves (`NodeType.is_view`). Labels below views come last. So the
    first label of a leaf is one outside of views, if it has any there. The others tell by `Label.view_path` that they
    are below a view, and callers may ignore them.

    Args:
        prefix: the prefix tree.
        tree: the DAG.
        is_label: tells whether an object in the prefix is a label and not a node.
        name: the name of the prefix, for errors.
        path: the path to the root, for errors and results.

    Raises:
        SharingMismatchError: if the prefix has a node that does not fit the node of the tree at the same path. See
            `parts_that_fit`.

    Cost: one visit for each pair of a record and a part of the prefix.
    """
    # A shared node under the same part of the prefix gets the same labels again. So each pair is visited once, and this
    # has, for each part of the prefix, the numbers of the records that it has reached.
    reached: IdentityDict[set[int]] = IdentityDict()
    # Each entry is (number of a record, part of the prefix for it, path, path of the outermost view on that path).
    stack: list[tuple[int, Any, Path, Path | None]] = [(tree.root, prefix, path, None)]
    # What is below views comes last, when it is known which records also have a place outside of views.
    below_views: list[tuple[int, Any, Path, Path | None]] = []
    with_place_outside_views: set[int] = set()
    while stack or below_views:
        if not stack:
            stack, below_views = below_views[::-1], []
        number, part, part_path, view_path = stack.pop()
        if view_path is None:
            with_place_outside_views.add(number)
        op, children = tree.records[number]
        node = op.node if type(op) is Update else op
        reached_by_part = reached.setdefault(part, set())
        # Two equal numbers may be one object by accident. So for a leaf both are yielded.
        if number in reached_by_part and (type(node) is Node or not is_number(part)):
            continue
        reached_by_part.add(number)
        # A leaf. An object of the caller, the only other record that is no node, gets no label.
        if type(node) is not Node:
            if op is LEAF or type(op) is Static:
                yield Label(number, part, part_path, view_path if number in with_place_outside_views else None)
            continue
        # A node. A label holds for all of its children, and a node of the prefix has one part for each child.
        if type(part) is not Branch and is_label(part):
            parts: Sequence[Any] = [part] * len(children)
        else:
            parts = prefixes_of_children(part, node, len(children), name, part_path)
        # Children are pushed in reverse, so that they come off the stack in flatten order.
        steps = tuple(zip(node.keys, children, parts, strict=True))
        if node.type.is_view and view_path is None:
            view_path = part_path
        entries = [(child, child_part, (*part_path, key), view_path) for key, child, child_part in steps]
        if node.type.is_view:
            below_views.extend(entries)
        else:
            stack.extend(reversed(entries))


def prefixes_of_children(part: Any, node: Node, num_children: int, name: str, path: Path) -> Sequence[Any]:
    """Takes a node in a prefix apart into one part for each child of the node of the tree at the same path.

    Args:
        part: the node in the prefix. A leaf that is no label fits no node, and raises the error.
        node: the node of the tree at the same path.
        num_children: how many children the node of the tree has.
        name: the name of the prefix, for errors.
        path: the path of both, for errors.

    Raises:
        SharingMismatchError: if it does not fit. A `Branch` is not checked: sharedtree made it for this tree.
    """
    if type(part) is Branch:
        return part.parts
    fitting_parts = parts_that_fit(part, node, num_children)
    if fitting_parts is None:
        node_text, part_details = f"{op_text(node)} with {children_text(num_children)}", ""
        node_type = node_type_of(part)
        # If the classes are the same, the numbers of children differ, or the auxiliary data.
        if node_type is not None and node_type.cls is node.type.cls:
            parts, aux = node_type.take_apart(part)
            part_data, node_data = Static(aux).peek(), node.aux.peek()
            part_details = (
                f" with {children_text(len(parts))} and the static data {distinguishing_text(part_data, node_data)}"
            )
            node_text += f" and the static data {distinguishing_text(node_data, part_data)}"
        raise_prefix_mismatch(name, part, node_text, path, part_details)
    return fitting_parts


def parts_that_fit(part: Any, node: Node, num_children: int) -> Sequence[Any] | None:
    """Takes a node in a prefix apart, if it fits the node of the tree at the same path.

    It fits if it is of the same class and has as many children, with the same names. The auxiliary data of plain
    containers must be equal.

    Args:
        part: the node in the prefix, or any other object, which does not fit.
        node: the node of the tree.
        num_children: how many children the node of the tree has.

    Returns:
        One part for each child. None if the node in the prefix does not fit.
    """
    node_type = node_type_of(part)
    # A leaf has no node type.
    if node_type is None or node_type.cls is not node.type.cls:
        return None
    parts, aux = node_type.take_apart(part)
    if len(parts) != num_children:
        return None
    # The auxiliary data of a module may differ: a prefix for a model need not repeat its static fields. But the
    # auxiliary data may also be names, as those in a `FrozenDict`. Names alone need not be the same, because a class
    # may take its keys from anywhere.
    if not node.type.is_plain and node_type.keys_of(part) == node.keys:
        return parts
    return parts if Static(aux) == node.aux else None


def raise_prefix_mismatch(name: str, part: Any, expected: str, path: Path, part_details: str = "") -> NoReturn:
    """Raises the error for a prefix that does not fit a tree.

    Args:
        name: the name of the prefix.
        part: the part of the prefix that does not fit.
        expected: what the tree has at the same path, in words: "a `Linear` with 2 children".
        path: the path of both.
        part_details: a text to follow the class of the part: " with 3 children". Empty if the class says enough.
    """
    text = jtu.keystr(path)
    place = f" at `{text}`" if text else ""
    raise SharingMismatchError(
        f"`{name}` does not fit the tree{place}: it has a `{type(part).__name__}`{part_details} where the tree has "
        f"{expected}.\n"
        "Give one `value` for everything there, or one for each leaf:\n"
        f"    {name} = jax.tree.map(lambda _: value, model)",
        (text,),
    )


def is_number(part: Any) -> bool:
    """Returns True if a label is a Python or NumPy number. Whether two equal numbers are one object means nothing."""
    return isinstance(part, (int, float, complex, np.generic))
