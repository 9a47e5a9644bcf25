"""Pack and unpack: a DAG into its unique traced leaves and its structure, and back.

By the native walk where that is in use and can do it, and by the one in Python otherwise, with the same outcome.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import _walk
from ._native_walk import native, natively
from ._structure import Record, Structure, intern
from ._trees_taken_apart import Walked
from ._walk import DEFAULT_RULES, Rules as Rules

if TYPE_CHECKING or native is None:
    from ._walk import Tags as Tags
else:
    Tags = native.Tags


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = ""
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree without its structure: the traced leaves, the records, the number of the root. See `_walk.walk`."""
    found = natively(tree, tags, rules, prefix)
    if found is None:
        return _walk.walk(tree, tags, rules, prefix)
    leaves, known = found
    return leaves, known.records, known.root


def walked(tree: Any, rules: Rules = DEFAULT_RULES, prefix: str = "") -> Walked:
    """A tree by itself, taken apart. Arguments and errors as for `_walk.walk`."""
    tags = Tags()
    found = natively(tree, tags, rules, prefix)
    if found is not None:
        return Walked.of(found[1], tags.objects)
    _, records, root = _walk.walk(tree, tags, rules, prefix)
    return Walked(records, root, tags.objects)


def pack(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", maker: Any = None
) -> tuple[list[Any], Structure]:
    """DAG → (traced leaves not seen before, interned structure). Arguments and errors as for `_walk.walk`."""
    base = len(tags.objects)
    found = natively(tree, tags, rules, prefix)
    if found is None:
        leaves, records, root = _walk.walk(tree, tags, rules, prefix)
        return leaves, intern(records, root, base, maker)
    leaves, known = found
    if maker is None:
        return leaves, known
    return leaves, intern(known.records, known.root, base, maker)


def build(
    records: Sequence[Record] | Structure,
    leaves: Sequence[Any],
    table: list[Any],
    given: Callable[[int], Any] | None = None,
    update: Callable[[int, Any], Any] | None = None,
) -> None:
    """Runs down the records, or those of a structure, appending one object a record to `table`. See `_walk.build`."""
    if not isinstance(records, Structure):
        _walk.build(records, leaves, table, given, update)
    elif native is None:
        _walk.build(records.records, leaves, table, given, update)
    else:
        native.build(records, leaves, table, given, update)


def unpack(structure: Structure, leaves: Sequence[Any], table: list[Any] | None = None) -> Any:
    """(traced leaves, structure) → DAG, all nodes new.

    Args:
        structure: what to build.
        leaves: one object for each traced leaf; they need not be arrays.
        table: the objects of the earlier trees of the same crossing; extended.

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
