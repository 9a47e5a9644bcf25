"""What a transform that differentiates sees of a packed module: the leaves that can be differentiated, and those only.

Which they are is in the aux data, without the others, so that it is compared by value and outlives the call: pullbacks
cross `jax.jit`. The others go around the transform.

    (Pair(w, [w, n]), x)     packed   (Packed([w, n]), x)     split   (Differentiated([w]), x)   and   [[n]]
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from .._packed import LeafPath, Packed, with_keys
from .._structure import LEAF, Structure, reached_outside
from .._ties import is_inexact
from ._crossed import Graph, Position, is_container, is_packed
from ._treatments import Treatment


class Choice(NamedTuple):
    """Which leaves of a module are differentiated.

    Attributes:
        structure: of the module.
        chosen: for each of its leaves.
        place: of the module among all, by which two that are one are told apart.
    """

    structure: Structure
    chosen: tuple[bool, ...]
    place: int


class Differentiated:
    """A packed module whose children are the leaves to differentiate."""

    __slots__ = ("choice", "leaves")

    def __init__(self, leaves: Sequence[Any], choice: Choice) -> None:
        self.leaves = leaves
        self.choice = choice

    @property
    def structure(self) -> Structure:
        """That of the module."""
        return self.choice.structure

    def packed(self, others: Iterable[Any]) -> Packed:
        """The module packed again, with other leaves beside those that are differentiated."""
        own, rest = iter(self.leaves), iter(others)
        return Packed([next(own if yes else rest) for yes in self.choice.chosen], self.structure)

    def like(self, packed: Packed) -> "Differentiated":
        """The same of another packed module."""
        return Differentiated(_chosen(packed.leaves, self.choice.chosen), self.choice)

    def keyed(self) -> Iterator[tuple[LeafPath, Any]]:
        """The leaves with their paths."""
        keys = [key for key, yes in with_keys(self.choice.chosen, self.structure) if yes]
        refused = [LeafPath("")] * (len(self.leaves) - len(keys))
        return zip([*keys, *refused], self.leaves, strict=True)


def differentiated(
    is_chosen: Callable[[Position], Any], can_be_differentiated: Callable[[Any], bool] = lambda _: True
) -> Treatment:
    """What a transform that differentiates some arguments does to them, and to their leaves that can be.

    Args:
        is_chosen: argument → whether it is differentiated, or a prefix that says it of each leaf.
        can_be_differentiated: whether a leaf can.
    """
    return Treatment(
        is_chosen,
        lambda part: isinstance(part, bool),
        name="wrt",
        resolve=lambda chosen, leaf: chosen and can_be_differentiated(leaf),
        describe=lambda chosen: "differentiated" if chosen else "not differentiated",
    )


jtu.register_pytree_with_keys(
    Differentiated,
    lambda item: (item.keyed(), item.choice),
    lambda choice, leaves: Differentiated(tuple(leaves), choice),
    lambda item: (item.leaves, item.choice),
)


def split(
    tree: Any,
    can_be_differentiated: Callable[[Any], bool] = is_inexact,
    graph: Graph | None = None,
    is_selected: Any = None,
) -> tuple[Any, list[list[Any]]]:
    """A packed tree as the transform sees it, and for each module and each None the leaves that it does not see.

    Outside modules, and in containers there, everything is seen: that is the transform's to take or to refuse. But if
    something says which leaves are selected, then others are None there.

    Args:
        tree: packed.
        can_be_differentiated: whether a leaf can.
        graph: of all that was packed with it, and the objects, if there is more. A leaf that a container has from what
            was packed before and is not in the tree is added if the transform would refuse it, for it to see.
        is_selected: a tree of the same shape, with True or False for each leaf.
    """
    if is_selected is not None:
        return _split_as_selected(tree, can_be_differentiated, is_selected)
    items, treedef = jtu.tree_flatten(tree, is_leaf=_is_packed_or_none)
    places = [place for place, item in enumerate(items) if is_packed(item)]
    graph = graph or Graph.of(tree)
    roots = [items[place].structure.root for place in places if is_container(items[place])]
    outside = {number for root in roots for number in reached_outside(graph.records, root)}
    elsewhere = outside.difference(*[items[place].structure.leaf_numbers for place in places])
    leaves = [graph.objects[number] for number in sorted(elsewhere) if graph.records[number][0] is LEAF]
    refused = [leaf for leaf in leaves if not can_be_differentiated(leaf)]
    rest: list[list[Any]] = []
    for place, item in enumerate(items):
        if item is None:
            rest.append([None])
            continue
        if not is_packed(item):
            continue
        packed: Packed = item
        numbered = zip(packed.structure.leaf_numbers, packed.leaves, strict=True)
        chosen = tuple([number in outside or can_be_differentiated(leaf) for number, leaf in numbered])
        own = _chosen(packed.leaves, chosen)
        items[place] = Differentiated([*own, *refused], Choice(packed.structure, chosen, place))
        rest.append(_chosen(packed.leaves, [not yes for yes in chosen]))
        refused = []
    return treedef.unflatten(items), rest


def _split_as_selected(tree: Any, can_be_differentiated: Callable[[Any], bool], is_selected: Any) -> Any:
    items, treedef = jtu.tree_flatten(tree, is_leaf=_is_packed_or_none)
    rest: list[list[Any]] = []
    for place, (item, answer) in enumerate(zip(items, treedef.flatten_up_to(is_selected), strict=True)):
        if is_packed(item):
            packed: Packed = item
            answers = answer.leaves if is_packed(answer) else [answer] * len(packed.leaves)
            each = zip(packed.leaves, answers, strict=True)
            chosen = tuple([yes and can_be_differentiated(leaf) for leaf, yes in each])
            items[place] = Differentiated(_chosen(packed.leaves, chosen), Choice(packed.structure, chosen, place))
            rest.append(_chosen(packed.leaves, [not yes for yes in chosen]))
        elif item is None or not (answer and can_be_differentiated(item)):
            items[place] = None
            rest.append([item])
    return treedef.unflatten(items), rest


def _is_packed_or_none(item: Any) -> bool:
    return item is None or is_packed(item)


def _chosen(leaves: Sequence[Any], chosen: Iterable[bool]) -> list[Any]:
    return [leaf for leaf, yes in zip(leaves, chosen, strict=True) if yes]
