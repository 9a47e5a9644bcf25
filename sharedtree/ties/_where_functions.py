"""Asking a user's `where` function which nodes it means.

`where` is called on a stand-in for the tree, in which every node and every leaf is an object of its own class or a
marker, so that what it returns can be recognised by identity, even a number, a string or a `None`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import SharingMismatchError
from ..core._node_types import node_type_of
from ..core._printing import name_of_class, shown
from ..core._structure import Given, Node, Record, Update


class Marker:
    """Stands for a leaf. It has no attributes of an array, for `where` must not look at values."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<leaf {self.number}>"


class StandIns(NamedTuple):
    """One object for each record of a tree, on which functions can be called that choose nodes.

    Attributes:
        objects: of each record.
        numbers: the record of each object.
    """

    objects: list[Any]
    numbers: IdentityDict[int]


def stand_ins(records: Sequence[Record]) -> StandIns:
    """One object for each record, shared as the records are shared; leaves are markers, nodes are new nodes.

    A node that cannot be told from another one by identity (an empty tuple, a `None`) gets a marker too, unless
    nothing could be done with a marker in its place.
    """
    table: list[Any] = []
    for number, (op, children) in enumerate(records):
        assert type(op) not in (Given, Update)
        if type(op) is Node and op.type.cls is not type(None) and (children or op.type.cls is not tuple):
            table.append(op.type.put_together(op.aux.thaw(), [table[child] for child in children]))
        else:
            table.append(Marker(number))
    return StandIns(table, IdentityDict(zip(table, range(len(table)), strict=True)))


def require_where(where: Any, tree: Any, fix: str) -> None:
    """Raises if `where` is no function of a tree, as when it and the tree were given in the wrong order.

    Args:
        where: what should be the function.
        tree: what should be the tree.
        fix: the call as it should be, as a line of code.

    Raises:
        TypeError: with the fix.
    """
    # A module may be both, callable and a tree; a function is no tree.
    if callable(where) and not (node_type_of(where) is not None and node_type_of(tree) is None and callable(tree)):
        return
    raise TypeError(
        f"`where` is a function that takes the tree and returns nodes of it, not {shown(where)}, and the tree is "
        f"{shown(tree)}. Give each in its place:\n{fix}"
    )


def ask(where: Callable[[Any], Any], tree: StandIns, root: int, name: str = "where") -> tuple[list[int], bool]:
    """The records that `where` returns when called on the stand-in, and whether it returned just one.

    Raises:
        SharingMismatchError: if it returns something that is not part of the tree, or computes with a leaf.
    """

    def refusal(what: str) -> SharingMismatchError:
        return SharingMismatchError(
            f"`{name}` {what}. Return nodes or leaves of the tree itself, and do not compute with them:\n"
            f"    {name}=lambda m: (m.embed.weight, m.head.weight)"
        )

    numbers = tree.numbers
    try:
        answer = where(tree.objects[root])
    except AttributeError as error:
        if type(error.obj) is not Marker:
            raise
        raise refusal(f"takes `.{error.name}` of a leaf, but is called on a stand-in without values") from None
    except TypeError as error:
        # Python's own say the class, JAX's may print the object.
        if not any(text in str(error) for text in (Marker.__name__, "<leaf ")):
            raise
        raise refusal("computes with a leaf, but is called on a stand-in without values") from None
    if answer in numbers:
        return [numbers[answer]], True
    found: list[int] = []
    for part in jtu.tree_leaves(answer, is_leaf=lambda x: x in numbers or x is None):
        if part not in numbers:
            raise refusal(f"returned a `{name_of_class(part)}` that is not part of the tree it was given")
        found.append(numbers[part])
    return found, False
