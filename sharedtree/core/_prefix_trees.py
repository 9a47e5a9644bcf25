"""Prefix trees: `in_axes`, shardings, filter specifications.

A prefix has the shape of a tree down to some depth; a leaf of the prefix holds for everything below it. On a DAG the
same leaf may be reached by several paths, under different labels: what to do about that is the caller's affair.
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
    """A leaf of the tree, the label that the prefix has for it, and the path on which the two met."""

    record: int
    label: Any
    path: Path


class Branch:
    """A node of a prefix that the library made itself: it fits any node with as many children.

    Two are equal if their parts are. `branch_of` makes equal ones one object.

    Attributes:
        parts: what there is for each child.
    """

    __slots__ = ("__weakref__", "_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash: int | None = None

    def __hash__(self) -> int:
        # It is kept, for a branch that is shared would be hashed once for each path to it: 2**60 times in a tower.
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
    """Returns the branch with these parts, of which there is one while it is alive.

    So prefixes that share parts are compared part by part, and not path by path.

    Args:
        parts: True, False, or branches that this function returned. User's objects could run code in the lock.
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
        is_label: whether an object in the prefix is a label and not a node.
        name: what the prefix is called, for errors.
        path: the path to the root, for errors and results.

    Yields:
        Each leaf once for each label object that reaches it; numbers are no objects, so those at each place.

    Raises:
        SharingMismatchError: where the prefix has a node of another class than the tree.

    Cost: one visit for each pair of a record and an object of the prefix.
    """
    met: IdentityDict[set[int]] = IdentityDict()  # part of the prefix → the records at which it was met
    stack: list[tuple[int, Any, Path]] = [(tree.root, prefix, path)]
    while stack:
        number, part, where = stack.pop()
        op, children = tree.records[number]
        node = op.node if type(op) is Update else op
        at = met.setdefault(part, set())
        if number in at and (type(node) is Node or not is_number(part)):
            continue
        at.add(number)
        if type(node) is not Node:
            if op is LEAF or type(op) is Static:
                yield Label(number, part, where)
            continue
        if type(part) is not Branch and is_label(part):
            parts: Sequence[Any] = [part] * len(children)
        else:
            parts = parts_for(part, node, len(children), name, where)
        stack.extend(
            (child, below, (*where, key))
            for key, child, below in reversed(tuple(zip(node.keys, children, parts, strict=True)))
        )


def parts_for(part: Any, node: Node, num_children: int, name: str, where: Path) -> Sequence[Any]:
    """What part of a prefix, which is no label, has for each child of a node of the tree.

    Args:
        part: of the prefix.
        node: of the tree.
        num_children: of the node.
        name: what the prefix is called, for errors.
        where: the path, for errors.

    Raises:
        SharingMismatchError: if the two are no nodes of one class, with equally many children.
    """
    if type(part) is Branch:
        return part.parts
    node_type = node_type_of(part)
    parts, aux = ((), None) if node_type is None else node_type.take_apart(part)
    has_class = node_type is not None and node_type.cls is node.type.cls
    if not has_class or len(parts) != num_children or (node.type.is_plain and Static(aux) != node.aux):
        more, own = "", f"{name_of(node)} with {num_children} children"
        if has_class:  # but with other keys, for example
            data, other = Static(aux).peek(), node.aux.peek()
            more = f" with {len(parts)} children and the static data {shown_beside(data, other)}"
            own += f" and the static data {shown_beside(other, data)}"
        raise_unfit(name, part, own, where, more)
    return parts


def raise_unfit(name: str, part: Any, own: str, where: Path, more: str = "") -> NoReturn:
    """Raises because a prefix does not fit a tree.

    Args:
        name: what the prefix is called.
        part: of it.
        own: what the tree has there, in words.
        where: the path.
        more: what else there is to say of the part.
    """
    text = jtu.keystr(where)
    place = f"at `{text}`" if text else "as a whole"
    raise SharingMismatchError(
        f"`{name}` does not fit the tree {place}: it has a `{type(part).__name__}`{more} where the tree has {own}.\n"
        "Give one value for the whole node, or a node of the same class:\n"
        f"    {name} = jax.tree.map(lambda _: value, model)",
        (text,),
    )


def is_number(part: Any) -> bool:
    """Whether it is a number of Python or NumPy: a value, of which nobody can say whether two are one."""
    return isinstance(part, (int, float, complex, np.generic))


def label_at(prefix: Any, tree: Rooted, path: Path, is_label: Callable[[Any], bool]) -> Any:
    """The label that a prefix, known to fit, has at one path."""
    number, part = tree.root, prefix
    for key in path:
        op, children = tree.records[number]
        node = op.node if type(op) is Update else op
        assert type(node) is Node
        index = node.keys.index(key)
        number = children[index]
        if not is_label(part):
            node_type = node_type_of(part)
            assert node_type is not None
            part = node_type.take_apart(part)[0][index]
    return part
