"""Hands: what a transform sees of a tree. Its leaves, each once, dealt by what the transform does with them.

    f(Net(w, b), x)     in_axes=(Net(0, None), 0)      hands   [w, x] and [b]      under   in_axes=(0, None)

A hand is a node of a vanilla pytree. Its leaves are the children; the rest is aux data, which JAX compares: the
structure of the whole tree, and which of its leaves are in this hand. From all hands together the tree is put together.
"""

from collections.abc import Sequence
from typing import Any

from jax import tree_util as jtu

from .._arguments import LeafPath
from .._graph import unpack
from .._structure import Given, Structure, Update
from .._walked import leaf_paths, with_paths


class Deal:
    """Which leaves of a structure a hand has.

    Two are equal if they have the same leaves of the same structure.

    Args:
        structure: of the whole tree.
        numbers: which of its leaves, by their places among them; None for all.
        call: the caller's side of the call that is under way, for the function should it be traced. Not compared.
    """

    __slots__ = ("call", "numbers", "structure")

    def __init__(self, structure: Structure, numbers: tuple[int, ...] | None = None, call: Any = None) -> None:
        self.structure = structure
        self.numbers = numbers
        self.call = call

    def __eq__(self, other: object) -> bool:
        return type(other) is Deal and self.structure is other.structure and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash((self.structure, self.numbers))

    def __repr__(self) -> str:
        return f"Deal({self.structure!r}, {'all' if self.numbers is None else self.numbers})"

    def __reduce__(self) -> Any:
        return Deal, (self.structure, self.numbers)

    @property
    def num_leaves(self) -> int:
        """How many leaves the hand has."""
        return self.structure.num_leaves if self.numbers is None else len(self.numbers)


class Hand:
    """The leaves of a tree that one argument or result of a transform has. Nothing checks that they fit."""

    __slots__ = ("deal", "leaves")

    def __init__(self, leaves: Sequence[Any], deal: Deal) -> None:
        self.leaves = leaves
        self.deal = deal

    @property
    def structure(self) -> Structure:
        """That of the whole tree."""
        return self.deal.structure

    @property
    def paths(self) -> list[str]:
        """Where its leaves are in the tree."""
        texts, numbers = leaf_paths(self.deal.structure), self.deal.numbers
        return texts if numbers is None else [texts[number] for number in numbers]

    def __repr__(self) -> str:
        """As the tree prints: JAX quotes what a function returned in its own errors."""
        structure = self.deal.structure
        is_whole = structure.base == 0 and all(type(op) not in (Given, Update) for op, _ in structure.records)
        if is_whole and self.deal.numbers is None:
            return repr(unpack(structure, self.leaves))
        return f"…({', '.join(map(str, self.leaves))})"


class Hands:
    """The hands of one result; or a label for each, which is a prefix of them. In JAX's messages it has no name."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts


jtu.register_pytree_with_keys(
    Hands,
    lambda hands: ([(LeafPath(""), part) for part in hands.parts], None),
    lambda _, parts: Hands(tuple(parts)),
    lambda hands: (tuple(hands.parts), None),
)


def whole(leaves: Sequence[Any], structure: Structure) -> Hand:
    """All leaves of a tree as one hand."""
    return Hand(leaves, Deal(structure))


def gathered(hands: Sequence[Hand]) -> list[Any]:
    """The leaves of a tree, in order, from all of its hands; None for those of a hand that is not there."""
    deal = hands[0].deal
    if deal.numbers is None:
        return list(hands[0].leaves)
    leaves: list[Any] = [None] * deal.structure.num_leaves
    for hand in hands:
        for number, leaf in zip(hand.deal.numbers or (), hand.leaves, strict=True):
            leaves[number] = leaf
    return leaves


jtu.register_pytree_with_keys(
    Hand,
    lambda hand: (with_paths(hand.leaves, hand.paths), hand.deal),
    lambda deal, leaves: Hand(tuple(leaves), deal),
    lambda hand: (hand.leaves, hand.deal),
)
