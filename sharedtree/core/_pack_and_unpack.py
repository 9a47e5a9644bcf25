"""Pack and unpack: a DAG into its unique traced leaves and its structure, and back.

    pack([w, Pair(w, 3)])    →  leaves [w], structure of a list that holds a leaf and a `Pair` of the same leaf and 3
    unpack(structure, [v])   →  [v, Pair(v, 3)]

Each function uses the native walk if it is in use and can do the job, and otherwise the one in Python, with the same
outcome.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import _walk
from ._native_walk import native, natively
from ._structure import FlatDag, Record, Structure, intern
from ._walk import DEFAULT_RULES, Rules as Rules

if TYPE_CHECKING or native is None:
    from ._walk import Tags as Tags
else:
    Tags = native.Tags


def pack(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", maker: Any = None
) -> tuple[list[Any], Structure]:
    """Takes a tree apart into its traced leaves and its interned structure. Arguments and errors as for `_walk.walk`.

    Args:
        tree: any object.
        tags: the objects that earlier trees of the same `Context` had. Extended.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
        maker: stands for the `Context`, see `Structure`; None outside of one.

    Returns:
        The traced leaves not seen before, and the structure.
    """
    base = len(tags.objects)
    packed = natively(tree, tags, rules, prefix)
    if packed is None:
        leaves, records, root = _walk.walk(tree, tags, rules, prefix)
        return leaves, intern(records, root, base, maker)
    leaves, structure = packed
    # The native walk knows no makers: its table leads to structures outside of any `Context`.
    if maker is None:
        return leaves, structure
    return leaves, intern(structure.records, structure.root, base, maker)


def walked(tree: Any, rules: Rules = DEFAULT_RULES, prefix: str = "") -> FlatDag:
    """Packs a tree by itself, and keeps its objects. Arguments and errors as for `_walk.walk`."""
    tags = Tags()
    packed = natively(tree, tags, rules, prefix)
    if packed is not None:
        _, structure = packed
        return FlatDag.of(structure, tags.objects)
    _, records, root = _walk.walk(tree, tags, rules, prefix)
    return FlatDag(records, root, tags.objects)


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = ""
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree without interning its structure. Arguments, results and errors as for `_walk.walk`."""
    packed = natively(tree, tags, rules, prefix)
    if packed is None:
        return _walk.walk(tree, tags, rules, prefix)
    leaves, structure = packed
    return leaves, structure.records, structure.root


def unpack(structure: Structure, leaves: Sequence[Any], table: list[Any] | None = None) -> Any:
    """Puts a DAG together. All of its nodes are new; the leaves are taken as they are.

    Args:
        structure: the structure to build.
        leaves: one object for each traced leaf. They need not be arrays.
        table: the objects of the earlier trees of the same `Context`. Extended.

    Raises:
        ValueError: if the number of leaves is not `structure.num_leaves`.
    """
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            f"The structure has {structure.num_leaves} traced leaves, but {len(leaves)} were given. Tied leaves count "
            "once: take the leaves from `sharedtree.tree.leaves`."
        )
    table = [] if table is None else table
    build(structure, leaves, table)
    return table[structure.root]


def build(
    records: Sequence[Record] | Structure,
    leaves: Sequence[Any],
    table: list[Any],
    given: Callable[[int], Any] | None = None,
    update: Callable[[int, Any], Any] | None = None,
) -> None:
    """Runs down the records, appending one object a record to `table`. See `_walk.build`.

    The native walk compiles a structure once and builds it many times. Bare records are built in Python.
    """
    if not isinstance(records, Structure):
        _walk.build(records, leaves, table, given, update)
    elif native is None:
        _walk.build(records.records, leaves, table, given, update)
    else:
        native.build(records, leaves, table, given, update)
