"""Prefix arguments of transforms (`in_axes`, `out_axes`, `in_shardings`, …), translated to what JAX sees.

JAX sees one `Packed` where the user has a module, so a prefix that reaches inside the module becomes a `Packed` with
one label for each leaf. A prefix that has one label for the whole module stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._graph import Tags, build, walk
from .._node_types import is_module, node_type_of
from .._packed import Packed
from .._prefix import labels
from .._structure import LEAF, Record
from ._crossing import OUTSIDE, is_packed, packed_in

IsLabel = Callable[[Any], bool]


def has_modules(prefix: Any) -> bool:
    """Whether a prefix reaches inside a module."""
    return any(is_module(item) for item in walk(prefix, Tags(), OUTSIDE)[0])


def has_containers(prefix: Any) -> bool:
    """Whether a prefix of the arguments or of a result reaches inside a container that can be mutated."""
    items = walk(prefix, Tags(), OUTSIDE._replace(containers=True))[0]
    return any(node_type_of(item) is not None and not is_module(item) for item in items)


def parts(prefix: Any, tree: Any, is_label: IsLabel, name: str, *, only_modules: bool = False) -> list[Any]:
    """What a prefix has for each item of a packed tree: for each `Packed` and each leaf outside modules, in order."""
    items, records, root = walk(tree, Tags(), OUTSIDE)
    found = {label.record: label.label for label in labels(prefix, records, root, is_label, name)}
    each = [found[number] for number, (op, _) in enumerate(records) if op is LEAF]
    return [part for part, item in zip(each, items, strict=True) if is_packed(item)] if only_modules else each


def spread(prefix: Any, tree: Any, records_of_all: Sequence[Record], is_label: IsLabel, name: str) -> Any:
    """A prefix of a packed tree, in the same shape, with labels for leaves.

    Args:
        prefix: the user's prefix tree.
        tree: a packed argument or result.
        records_of_all: the records of its whole crossing.
        is_label: whether an object in it is a label.
        name: what it is called, for errors.
    """
    if not any(packed_in(tree, 0)):
        return prefix
    items, records, root = walk(tree, Tags(), OUTSIDE)

    def translated(part: Any, item: Any) -> Any:
        if type(item) is not Packed or is_label(part):
            return part
        structure = item.structure
        label_of = {each.record: each.label for each in labels(part, records_of_all, structure.root, is_label, name)}
        own = range(structure.base, structure.base + len(structure.records))
        return Packed([label_of.get(n) for n in own if records_of_all[n][0] is LEAF], structure)

    table: list[Any] = []
    each = zip(parts(prefix, tree, is_label, name), items, strict=True)
    build(records, [translated(part, item) for part, item in each], table)
    return table[root]
