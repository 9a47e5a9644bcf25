"""Hands: what a transform sees of a tree. Its leaves, each once, dealt by what the transform does with them.

    f(Net(w, b), x)     in_axes=(Net(0, None), 0)      hands   [w, x] and [b]      under   in_axes=(0, None)

A hand is a node of a vanilla pytree. Its leaves are the children; the rest is aux data, which JAX compares: the
structure of the whole tree, and which of its leaves are in this hand. From all hands together the tree is put together.

A transform that differentiates hands back the hand of what it differentiated, with other leaves. It becomes a tree with
the records of the arguments again, and None for whatever was in other hands, or is static:

    f(Net(w, [w, 3]), x)     hands [x] and [w]      gradient [g]      Net(g, [g, None])

A Jacobian nests them: in the result of the function, each leaf is such a hand; in that of a Hessian, of hands.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import tree_util as jtu

from ..core._call_arguments import Arguments, LeafPath
from ..core._distinct_leaves import distinct, with_identity
from ..core._jax_internals import TRACE, ConcreteArray
from ..core._native_walk import native
from ..core._pack_and_unpack import build, unpack
from ..core._static_values import Static
from ..core._structure import Given, Record, Structure, Update
from ..core._trees_taken_apart import Walked, leaf_paths, with_paths
from ..ties._leaf_notes import hand_on, note_gradient, note_tied
from ..ties._policy_and_context import DEFAULT, Policy, current_policy


class _Compared:
    """What JAX compares whenever a function is called; in C where that is in use."""

    __slots__ = ("call", "numbers", "structure")

    def __init__(self, structure: Structure, numbers: tuple[int, ...] | None = None, call: Any = None) -> None:
        self.structure = structure
        self.numbers = numbers
        self.call = call

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.structure is other.structure and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash((self.structure, self.numbers))


class Deal(_Compared if TYPE_CHECKING or native is None else native.Deal):
    """Which leaves of a structure a hand has.

    Two are equal if they have the same leaves of the same structure.

    Args:
        structure: of the whole tree.
        numbers: which of its leaves, by their places among them; None for all.
        call: the caller's side of the call that is under way, for the function should it be traced. Not compared.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Deal({self.structure!r}, {'all' if self.numbers is None else self.numbers})"

    def __reduce__(self) -> Any:
        return Deal, (self.structure, self.numbers)

    @property
    def num_leaves(self) -> int:
        """How many leaves the hand has."""
        return self.structure.num_leaves if self.numbers is None else len(self.numbers)


class _Hand:
    """The parts of a hand; in C where that is in use."""

    __slots__ = ("deal", "leaves")
    leaves: Sequence[Any]
    deal: Deal


class Hand(_Hand if TYPE_CHECKING or native is None else native.Hand):
    """The leaves of a tree that one argument or result of a transform has. Nothing checks that they fit."""

    __slots__ = ()

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
        return self._own(leaf_paths(self.deal.structure))

    @property
    def operand(self) -> int:
        """Which child of the root its leaves are in; of a hand of one operand."""
        tree, numbers = Walked.of(self.structure), self.deal.numbers
        if not numbers:
            return 0
        children = range(len(tree.records[tree.root][1]))
        return next(i for i in children if tree.leaf_numbers[numbers[0]] in tree.child(i).reached)

    def named(self, names: Sequence[str]) -> "Hands":
        """The leaves with paths that begin with other names, for JAX's messages.

        Args:
            names: one for each child of the root, as far as they have others.
        """
        tree = Walked.of(self.structure)
        node = tree.node(tree.root)
        assert node is not None
        begin = dict(zip(node.keys, map(LeafPath, names), strict=False))
        paths = [tree.first_paths[number] for number in tree.leaf_numbers]
        return Hands(self.leaves, self._own([jtu.keystr((begin.get(path[0], path[0]), *path[1:])) for path in paths]))

    def _own(self, of_all: list[str]) -> list[str]:
        numbers = self.deal.numbers
        return of_all if numbers is None else [of_all[number] for number in numbers]

    @property
    def is_tree(self) -> bool:
        """Whether it has all of a tree that can be put together by itself."""
        records = self.deal.structure.records
        return self.deal.numbers is None and all(type(op) not in (Given, Update) for op, _ in records)

    def tree(self) -> Any:
        """That tree."""
        return unpack(self.deal.structure, self.leaves)

    def __repr__(self) -> str:
        """As the tree prints: JAX quotes what a function returned in its own errors."""
        return repr(self.tree()) if self.is_tree else f"…({', '.join(map(str, self.leaves))})"


class Hands:
    """The hands of one result; or a label for each, which is a prefix of them. In JAX's messages it has no name.

    Args:
        parts: the hands.
        names: what the parts are called after all.
    """

    __slots__ = ("names", "parts")

    def __init__(self, parts: Sequence[Any], names: Sequence[str] = ()) -> None:
        self.parts = parts
        self.names = names or [""] * len(parts)


jtu.register_pytree_with_keys(
    Hands,
    lambda hands: (with_paths(hands.parts, hands.names), None),
    lambda _, parts: Hands(tuple(parts)),
    lambda hands: (tuple(hands.parts), None),
)


def whole(leaves: Sequence[Any], structure: Structure) -> Hand:
    """All leaves of a tree as one hand."""
    return Hand(leaves, Deal(structure))


def gathered(hands: Sequence[Hand], bare: Sequence[Any] = ()) -> list[Any]:
    """The leaves of a tree, in order, from all of its hands.

    Args:
        hands: of one tree.
        bare: the leaves that are in none of them, in order; if there are more, they are None.
    """
    deal = hands[0].deal
    if deal.numbers is None:
        return list(hands[0].leaves)
    leaves: list[Any] = [None] * deal.structure.num_leaves
    missing = set(range(len(leaves)))
    for hand in hands:
        for number, leaf in zip(hand.deal.numbers or (), hand.leaves, strict=True):
            leaves[number] = leaf
            missing.discard(number)
    for number, leaf in zip(sorted(missing), bare, strict=False):
        leaves[number] = leaf
    return leaves


if native is not None:
    native.take_over(
        "calls",
        ConcreteArray,
        Hand,
        Deal,
        Arguments,
        Hands,
        vars(Hands)["parts"],
        *TRACE,
        Policy,
        DEFAULT,
        current_policy,
    )
jtu.register_pytree_with_keys(
    Hand,
    lambda hand: (with_paths(hand.leaves, hand.paths), hand.deal),
    (lambda deal, leaves: Hand(tuple(leaves), deal)) if native is None else native.hand_of,
    (lambda hand: (hand.leaves, hand.deal)) if native is None else native.hand_parts,
)


_NONE = Static(None)


def without_statics(records: Sequence[Record]) -> list[Record]:
    """Records with None for each static leaf: those of a gradient."""
    return [(_NONE, ()) if type(op) is Static else (op, children) for op, children in records]


def like(
    hands: Sequence[Hand],
    originals: Sequence[Any] = (),
    nested: Callable[[Any], Any] = lambda leaf: leaf,
    *,
    is_gradient: bool = True,
) -> Any:
    """What a transform made in the places of hands, as the tree that these were dealt from.

    Args:
        hands: with their leaves; what is in other hands is None.
        originals: the leaves in whose places they are, of which something may have been noted.
        nested: a leaf → what it becomes, if it is a tree itself.
        is_gradient: whether each leaf is the sum over its paths, which a rule that returns it is believed.
    """
    structure = hands[0].deal.structure
    records = without_statics(structure.records)
    # Under `jax.jit` JAX hands one tracer for all cotangents that are equal. That is no tie of anyone's.
    own = iter(distinct([nested(leaf) for hand in hands for leaf in hand.leaves]))
    tree = Walked(records, structure.root)
    leaves = gathered([Hand([next(own) for _ in hand.leaves], hand.deal) for hand in hands])
    leaves = with_identity(leaves, tree)
    if originals:
        hand_on(originals, leaves)
    if is_gradient:
        note_tied(tree, leaves)
        note_gradient(leaves)
    table: list[Any] = []
    build(records, leaves, table)
    return table[structure.root]


def tangents_of(hand: Hand, *, is_gradient: bool = True) -> Any:
    """What a rule is given in the place of a hand with all leaves: in modules, None for what has no tangent."""
    structure = hand.structure
    outside = Walked.of(structure).outside
    leaves = [
        None if n not in outside and getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf
        for n, leaf in zip(structure.leaf_numbers, hand.leaves, strict=True)
    ]
    return like((Hand(leaves, hand.deal),), is_gradient=is_gradient)
