"""Prefix arguments of transforms (`in_axes`, `out_axes`, `in_shardings`, …), translated to what JAX sees.

JAX sees one `Packed` where the user has a module, so a prefix that reaches inside the module becomes a `Packed` with
one label for each leaf. A prefix that has one label for the whole module stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util as jtu

from .._errors import SharingMismatchError
from .._graph import Tags, build, walk
from .._node_types import is_module, node_type_of
from .._packed import Packed
from .._prefix import Label, labels
from .._structure import LEAF, Record
from ._crossed import is_packed
from ._packing import OUTSIDE

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


def spread(
    prefix: Any, tree: Any, records_of_all: Sequence[Record], is_label: IsLabel, name: str, *, always: bool = False
) -> Any:
    """A prefix of a packed tree, in the same shape, with labels for leaves.

    Args:
        prefix: the user's prefix tree.
        tree: a packed argument or result.
        records_of_all: the records of its whole crossing.
        is_label: whether an object in it is a label.
        name: what it is called, for errors.
        always: also where there is no module, and JAX could read the prefix as it is.

    Raises:
        SharingMismatchError: where the prefix does not fit the tree.
    """
    if not records_of_all and not always:
        return prefix
    items, records, root = walk(tree, Tags(), OUTSIDE)

    def translated(label: Label, item: Any) -> Any:
        part = label.label
        if is_label(part):
            return part
        if type(item) is not Packed:
            if node_type_of(part) is not None:  # JAX would print what else is in the tree
                text = jtu.keystr(label.path)
                raise SharingMismatchError(
                    f"`{name}` does not fit the tree at `{text}`: it has a `{type(part).__name__}` where the tree has "
                    "an array.",
                    (text,),
                )
            return part
        structure = item.structure
        label_of = {each.record: each.label for each in labels(part, records_of_all, structure.root, is_label, name)}
        own = range(structure.base, structure.base + len(structure.records))
        return Packed([label_of.get(n) for n in own if records_of_all[n][0] is LEAF], structure)

    table: list[Any] = []
    found = {label.record: label for label in labels(prefix, records, root, is_label, name)}
    each = zip([found[number] for number, (op, _) in enumerate(records) if op is LEAF], items, strict=True)
    build(records, [translated(label, item) for label, item in each], table)
    return table[root]
