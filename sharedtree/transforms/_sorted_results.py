"""Results sorted by label, for a prefix of the result (`out_axes`, `out_specs`) that reaches inside modules.

A transform may read such a prefix before it calls the function, or compare it with that of an earlier call. But what it
is a prefix of, the packed result, is there only once the function has returned. Which labels the prefix has is known
before. So the function returns its leaves in groups, one for each label, and the transform gets the labels:

    result    Net(w, b)                packed    Packed([w, b])
    prefix    Net(P("x"), P())         labels    Sorted([P("x"), P()])
                                       sorted    Sorted([Group([w]), Group([b])])

No function is made anew for that, and none is traced twice. The groups say where each leaf belongs, so that JAX's
messages name it as the user does, and so that the result can be put together again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from .._node_types import node_type_of
from .._packed import LeafPath
from .._structure import Record
from ._crossed import Graph
from ._prefixes import spread
from ._treatments import are_one


class Sorted:
    """The groups of a result, or the label of each."""

    __slots__ = ("groups",)

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = groups


class Places(NamedTuple):
    """Where the leaves of a group belong in the result."""

    treedef: Any
    numbers: tuple[int, ...]
    paths: tuple[str, ...]


class Group:
    """The leaves of a result that have one label."""

    __slots__ = ("leaves", "places")

    def __init__(self, leaves: Sequence[Any], places: Places) -> None:
        self.leaves = leaves
        self.places = places


jtu.register_pytree_with_keys(
    Sorted,
    lambda each: ([(LeafPath(""), group) for group in each.groups], None),
    lambda _, groups: Sorted(tuple(groups)),
    lambda each: (each.groups, None),
)

jtu.register_pytree_with_keys(
    Group,
    lambda group: (list(zip(map(LeafPath, group.places.paths), group.leaves, strict=True)), group.places),
    lambda places, leaves: Group(tuple(leaves), places),
    lambda group: (group.leaves, group.places),
)


def labels_of(prefix: Any, first: Any, is_label: Callable[[Any], bool]) -> Sorted:
    """The distinct labels of a prefix in the order in which they are met, after one that is always there."""
    found = [first]
    stack = [prefix]
    while stack:
        part = stack.pop()
        node_type = None if is_label(part) else node_type_of(part)
        if node_type is not None:
            stack.extend(reversed(node_type.take_apart(part)[0]))
        elif not any(are_one(part, label) for label in found):
            found.append(part)
    return Sorted(found)


def sort(
    result: Any,
    prefix: Any,
    first: Any,
    is_label: Callable[[Any], bool],
    name: str,
    changed: Sequence[str] | None = None,
) -> Sorted:
    """A packed result in groups, one for each of `labels_of(prefix, first, is_label)`.

    Args:
        result: a packed tree.
        prefix: the user's.
        first: a label that is always there.
        is_label: whether an object in the prefix is a label.
        name: what the prefix is called, for errors.
        changed: in place, where the result is that of the function and before it what was changed, the names of this.

    Raises:
        SharingMismatchError: where the prefix does not fit a module.
    """
    labels = labels_of(prefix, first, is_label)
    leaves, treedef = jtu.tree_flatten_with_path(result)
    each: list[Any] = []
    jtu.tree_map(
        lambda label, part: each.extend([label] * jtu.tree_structure(part).num_leaves),
        spread(prefix, result, records_of(result), is_label, name),
        result,
        is_leaf=lambda label: label is None,
    )
    groups: list[Group | None] = []
    for label in labels.groups:
        numbers = tuple([number for number, its in enumerate(each) if are_one(its, label)])
        places = Places(treedef, numbers, tuple([_text(leaves[number][0], changed) for number in numbers]))
        # To some transforms a None in a prefix is a label, to others a place without leaves.
        groups.append(None if label is None and not numbers else Group([leaves[i][1] for i in numbers], places))
    return Sorted(groups)


def _text(path: Sequence[Any], changed: Sequence[str] | None) -> str:
    """What JAX is to call a leaf, after the name of the option."""
    if changed is None:
        return jtu.keystr(tuple(path))
    beside, *inner = path
    if beside.idx == 1:
        return jtu.keystr(tuple(inner))
    module, *inner = inner
    return f" of `{changed[module.idx]}{jtu.keystr(tuple(inner))}` in place"


def records_of(result: Any) -> list[Record]:
    """The records of all modules in a packed result."""
    return Graph.of(result).records


def unsorted(result: Any) -> Any:
    """The inverse of `sort`, for what a transform made of a result; what was not sorted is returned as it is."""
    if type(result) is not Sorted:
        return result
    groups = [group for group in result.groups if group is not None]
    treedef = groups[0].places.treedef
    leaves: list[Any] = [None] * treedef.num_leaves
    for group in groups:
        for number, leaf in zip(group.places.numbers, group.leaves, strict=True):
            leaves[number] = leaf
    return treedef.unflatten(leaves)
