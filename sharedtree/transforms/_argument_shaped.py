"""Trees in the shape of the arguments: gradients, blocks of Jacobians, whatever a transform hands back of its own.

A transform that differentiates hands back the hand of what it differentiated, with other leaves. It becomes a tree with
the records of the arguments again, and None for whatever was in other hands, or is static:

    f(Net(w, [w, 3]), x)     hands [x] and [w]      gradient [g]      Net(g, [g, None])

A Jacobian nests them: in the result of the function, each leaf is such a hand; in that of a Hessian, of hands.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core._accidental_aliases import distinct, with_identity
from ..core._graph import build
from ..core._handle import Walked
from ..core._static_values import Static
from ..core._structure import Record, reached_outside
from ..ties._meant_untied import hand_on
from ..ties._whole_gradients import note_tied
from ._hands import Hand, gathered

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
    leaves = with_identity(leaves, records, tree.root, tree.leaf_numbers)
    if originals:
        hand_on(originals, leaves)
    if is_gradient:
        note_tied(records, [structure.root], dict(zip(tree.leaf_numbers, leaves, strict=True)))
    table: list[Any] = []
    build(records, leaves, table)
    return table[structure.root]


def tangents_of(hand: Hand, *, is_gradient: bool = True) -> Any:
    """What a rule is given in the place of a hand with all leaves: in modules, None for what has no tangent."""
    structure = hand.structure
    outside = reached_outside(structure.records, structure.root)
    leaves = [
        None if n not in outside and getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf
        for n, leaf in zip(structure.leaf_numbers, hand.leaves, strict=True)
    ]
    return like((Hand(leaves, hand.deal),), is_gradient=is_gradient)
