"""Prefix trees: `in_axes`, shardings, filter specifications.

    tree     {"a": w, "b": [w, v]}       prefix   {"a": 0, "b": None}       labels   w: 0   w: None   v: None

A prefix has the shape of a tree down to some depth. Its leaves are *labels*: what a transform does, such as an axis. A
label holds for all leaves below its place. In a DAG several paths may lead to one leaf, and the prefix may have a
different label on each. Callers decide what that means.
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
from ._sharing import Rooted, name_of
from ._static_values import Static, shown_beside
from ._structure import LEAF, Node, Path, Update


class Label(NamedTuple):
    """One label of one leaf.

    Attributes:
        record: the number of the leaf.
        label: the label that the prefix has for it.
        path: the first path on which the leaf has this label.
    """

    record: int
    label: Any
    path: Path


class Branch:
    """A node of a prefix that sharedtree made itself. It fits any node of a tree that has as many children.

    Two are equal if their parts are. `branch_of` makes equal ones one object.

    Attributes:
        parts: the prefix of each child.
    """

    __slots__ = ("__weakref__", "_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash: int | None = None

    def __hash__(self) -> int:
        # The hash is stored. Otherwise a shared branch would be hashed once for each path to it: 2**60 times, where 60
        # branches hold the next one twice.
        if self._hash is None:
            self._hash = hash((Branch, self.parts))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Branch and self.parts == other.parts)

    def __repr__(self) -> str:
        return f"Branch{self.parts!r}"


_branches: "weakref.WeakValueDictionary[tuple[Any, ...], Branch]" = weakref.WeakValueDictionary()
_lock = Lock()


def branch_of(parts: tuple[Any, ...]) -> Branch:
    """Returns the one branch with these parts, a new one if none is alive.

    Equal branches are one object, and tuples compare their items by `is` before they compare by `==`. So comparing two
    branches looks at their parts only, and not at each path below.

    Args:
        parts: True, False, or branches that this function returned. Objects of a user could run code under the lock.
    """
    with _lock:
        branch = _branches.get(parts)
        if branch is None:
            branch = _branches[parts] = Branch(parts)
        return branch


def labels(prefix: Any, tree: Rooted, is_label: Callable[[Any], bool], name: str, path: Path = ()) -> Iterator[Label]:
    """Spreads a prefix over the traced and static leaves of a DAG.

    Args:
        prefix: the prefix tree.
        tree: the DAG.
        is_label: tells whether an object in the prefix is a label and not a node.
        name: the name of the prefix, for errors.
        path: the path to the root, for errors and results.

    Yields:
        Each leaf, once for each label that reaches it. Labels are told apart by identity. A number has none, so
        it is yielded again for each edge by which it reaches the leaf. A leaf that a view is computed from has the
        labels of its own places, if it has any.

    Raises:
        SharingMismatchError: if the prefix has a node of another class than the tree at the same path.

    Cost: one visit for each pair of a record and an object of the prefix.
    """
    # A shared node under the same part of the prefix gets the same labels again, so each pair is visited once.
    visited: IdentityDict[set[int]] = IdentityDict()  # part of the prefix → numbers of the records that it has reached
    stack: list[tuple[int, Any, Path]] = [(tree.root, prefix, path)]
    # What is below views comes last, when it is known which records have places of their own.
    below_views: list[tuple[int, Any, Path]] = []
    with_own_place: set[int] = set()
    is_below_view = False
    while stack or below_views:
        if not stack:
            stack, below_views, is_below_view = below_views[::-1], [], True
        number, part, part_path = stack.pop()
        if not is_below_view:
            with_own_place.add(number)
        elif number in with_own_place:
            continue
        op, children = tree.records[number]
        node = op.node if type(op) is Update else op
        numbers = visited.setdefault(part, set())
        # Python shares small integers, so two equal numbers at two places may be one object or two. In either case both
        # are yielded.
        if number in numbers and (type(node) is Node or not is_number(part)):
            continue
        numbers.add(number)
        if type(node) is not Node:
            if op is LEAF or type(op) is Static:
                yield Label(number, part, part_path)
            continue
        if type(part) is not Branch and is_label(part):
            parts: Sequence[Any] = [part] * len(children)
        else:
            parts = prefixes_of_children(part, node, len(children), name, part_path)
        # Children are pushed in reverse, so that they come off the stack in flatten order.
        steps = tuple(zip(node.keys, children, parts, strict=True))
        entries = [(child, child_part, (*part_path, key)) for key, child, child_part in steps]
        if node.type.is_view:
            below_views.extend(entries)
        else:
            stack.extend(reversed(entries))


def prefixes_of_children(part: Any, node: Node, num_children: int, name: str, path: Path) -> Sequence[Any]:
    """Takes a node of a prefix apart: one prefix for each child of a node of the tree.

    Args:
        part: the node of the prefix.
        node: the node of the tree at the same path.
        num_children: how many children the node of the tree has.
        name: the name of the prefix, for errors.
        path: the path, for errors.

    Raises:
        SharingMismatchError: if the two are not nodes of one class with equally many children. Plain containers must
            have the same keys, too.
    """
    if type(part) is Branch:
        return part.parts
    # A leaf that is no label fits no node.
    node_type = node_type_of(part)
    parts, aux = ((), None) if node_type is None else node_type.take_apart(part)
    is_of_class = node_type is not None and node_type.cls is node.type.cls
    # The auxiliary data of a plain container, such as the keys of a dict, must be equal. That of a module may differ: a
    # prefix for a model need not repeat its static fields.
    if not is_of_class or len(parts) != num_children or (node.type.is_plain and Static(aux) != node.aux):
        node_text, part_details = f"{name_of(node)} with {num_children} children", ""
        if is_of_class:  # the two differ in their keys, for example
            part_data, node_data = Static(aux).peek(), node.aux.peek()
            part_details = f" with {len(parts)} children and the static data {shown_beside(part_data, node_data)}"
            node_text += f" and the static data {shown_beside(node_data, part_data)}"
        raise_prefix_mismatch(name, part, node_text, path, part_details)
    return parts


def raise_prefix_mismatch(name: str, part: Any, expected: str, path: Path, part_details: str = "") -> NoReturn:
    """Raises the error for a prefix that does not fit a tree.

    Args:
        name: the name of the prefix.
        part: the part of it that does not fit.
        expected: what the tree has at the same path, in words.
        path: the path.
        part_details: more about the part, to follow its class.
    """
    text = jtu.keystr(path)
    place = f"at `{text}`" if text else "as a whole"
    raise SharingMismatchError(
        f"`{name}` does not fit the tree {place}: it has a `{type(part).__name__}`{part_details} where the tree has "
        f"{expected}.\n"
        "Give one value for the whole node, or a node of the same class:\n"
        f"    {name} = jax.tree.map(lambda _: value, model)",
        (text,),
    )


def is_number(part: Any) -> bool:
    """Tells whether a label is a number of Python or NumPy: a value, for which being one object means nothing."""
    return isinstance(part, (int, float, complex, np.generic))
