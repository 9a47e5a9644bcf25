"""Prefix arguments of transforms (`in_axes`, `out_axes`, `in_shardings`, …), translated to what JAX sees.

JAX sees one `Packed` where the user has a module, so a prefix that reaches inside the module becomes a `Packed` with
one label for each leaf. A prefix that has one label for the whole module stays as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import tree_util as jtu

from .._graph import Tags, build, walk
from .._node_types import is_module
from .._packed import Packed
from .._prefix import labels
from .._structure import LEAF
from ._crossing import OUTSIDE, Argument, Names, Position, is_packed, packed_in
from ._treatments import part_them, require_one_treatment

IsLabel = Callable[[Any], bool]


def has_modules(prefix: Any) -> bool:
    """Whether a prefix reaches inside a module."""
    return any(is_module(item) for item in walk(prefix, Tags(), OUTSIDE)[0])


def parts(prefix: Any, tree: Any, is_label: IsLabel, name: str) -> list[Any]:
    """What a prefix has for each item of a packed tree: for each `Packed` and each leaf outside modules, in order."""
    _, records, root = walk(tree, Tags(), OUTSIDE)
    found = {label.record: label.label for label in labels(prefix, records, root, is_label, name)}
    return [found[number] for number, (op, _) in enumerate(records) if op is LEAF]


def spread(prefix: Any, tree: Any, is_label: IsLabel, name: str) -> Any:
    """A prefix of a packed tree, in the same shape, with labels for leaves.

    Args:
        prefix: the user's prefix tree.
        tree: a packed argument, or a packed result that refers to no other argument.
        is_label: whether an object in it is a label.
        name: what it is called, for errors.
    """
    if not any(packed_in(tree, 0)):
        return prefix
    items, records, root = walk(tree, Tags(), OUTSIDE)
    found = [item for item in items if type(item) is Packed]
    inside = [record for packed in found for record in packed.structure.records]
    start = min((packed.structure.base for packed in found), default=0)

    def translated(part: Any, item: Any) -> Any:
        if type(item) is not Packed or is_label(part):
            return part
        structure = item.structure
        padded = [None] * start + inside  # record numbers count from the first argument
        label_of = {
            label.record: label.label
            for label in labels(part, padded, structure.root, is_label, name)  # pyright: ignore[reportArgumentType]
        }
        own = range(structure.base, structure.base + len(structure.records))
        return Packed([label_of.get(n) for n in own if padded[n][0] is LEAF], structure)  # pyright: ignore

    table: list[Any] = []
    each = zip(parts(prefix, tree, is_label, name), items, strict=True)
    build(records, [translated(part, item) for part, item in each], table)
    return table[root]


def modules_with_parts(
    prefix: Any, items: Iterable[tuple[Position, Any]], is_label: IsLabel, name: str
) -> list[tuple[Argument, Any]]:
    """Each module in packed arguments, with what a prefix of the positional arguments has for it.

    Arguments by keyword have the label 0, as in `jax.vmap`.
    """
    items = list(items)
    num_args = sum(isinstance(position, int) for position, _ in items)
    per_argument: Sequence[Any] = prefix if isinstance(prefix, (tuple, list)) else [prefix] * num_args
    arguments: list[tuple[Argument, Any]] = []
    for position, value in items:
        found = list(packed_in(value, position))
        if not found:
            continue
        if isinstance(position, int):
            each = parts(per_argument[position], value, is_label, name)
            which = jtu.tree_leaves(value, is_leaf=is_packed)
            own = [part for part, item in zip(each, which, strict=True) if is_packed(item)]
        else:
            own = [0] * len(found)
        arguments += zip(found, own, strict=True)
    return arguments


def require_one_label_in_result(
    prefix: Any,
    result: Any,
    is_label: IsLabel,
    name: str,
    transform: str,
    resolve: Callable[[Any, Any], Any] = lambda label, _: label,
) -> None:
    """As `require_one_label`, for a packed result and a prefix of it."""
    modules = modules_with_parts((prefix,), [(0, result)], is_label, name)
    require_one_label(modules, _RESULT, is_label, name, transform, resolve)


_RESULT = Names(lambda result: result)


def require_one_label(
    arguments: Sequence[tuple[Argument, Any]],
    names: Names,
    is_label: IsLabel,
    name: str,
    transform: str,
    resolve: Callable[[Any, Any], Any] = lambda label, _: label,
) -> dict[int, Any]:
    """The label of each leaf of these modules.

    Args:
        arguments: from `modules_with_parts`.
        names: for paths.
        is_label: whether an object in the prefix is a label.
        name: what the prefix is called.
        transform: what the transform is called.
        resolve: (label, leaf) → label, for those that depend on the leaf.

    Raises:
        InconsistentSharingError: if a leaf has two labels.
    """
    records = [record for argument, _ in arguments for record in argument.structure.records]
    leaves = [leaf for argument, _ in arguments for leaf in argument.packed.leaves]
    leaf_of = dict(zip([n for n, (op, _) in enumerate(records) if op is LEAF], leaves, strict=True))
    return require_one_treatment(
        arguments,
        records,
        names,
        transform=transform,
        fix=part_them(names, [argument for argument, _ in arguments]),
        is_label=is_label,
        name=name,
        describe=lambda label: f"{name} {label!r}",
        resolve=lambda label, number: resolve(label, leaf_of[number]),
    )
