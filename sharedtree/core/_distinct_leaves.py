"""Repairs ties among leaves that JAX or NumPy computed: accidental ones are cut, lost ones are kept.

    jax.grad of a + b, eagerly     (g, g), one array      →  (g, a copy of g)
    np.sum of a tied array         a NumPy number         →  an array without dimensions

Eager transforms return one array for two results where they can: the gradients of `a + b` with respect to both are one
object. As leaves of a DAG that would be a tie that nobody made, so the second one becomes a copy.

NumPy returns a number, which carries no identity, where it computes from arrays without dimensions. Where the leaf is
tied, that would lose the tie, so the number becomes an array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._by_identity import IdentitySet
from ._structure import FlatDag, Structure, with_several_edges
from ._traced_leaves_and_identity import carries_identity


def distinct(leaves: Sequence[Any]) -> Sequence[Any]:
    """Copies each leaf that occurred before, so that all leaves are objects of their own.

    Returns the sequence unchanged if no leaf occurs twice. Cost: one set of ids, and the copies.
    """
    if len(set(map(id, leaves))) == len(leaves):  # alive in `leaves`
        return leaves
    seen = IdentitySet()
    distinct_leaves: list[Any] = []
    for leaf in leaves:
        is_first = seen.add(leaf)
        distinct_leaves.append(leaf if is_first or not carries_identity(leaf) else another(leaf))
    return distinct_leaves


def with_identity(leaves: Sequence[Any], tree: FlatDag | Structure) -> Sequence[Any]:
    """Converts NumPy's numbers to arrays at leaves that are tied.

    Returns the sequence unchanged if it has no such numbers. Cost: a check of each type, and of the edges if there are.

    Args:
        leaves: the new leaves of the tree, in order.
        tree: the tree whose leaves they become.
    """
    if not any(isinstance(leaf, np.generic) for leaf in leaves):
        return leaves
    tied = with_several_edges(tree.records, tree.root)
    new_leaves: list[Any] = []
    for number, leaf in zip(tree.leaf_numbers, leaves, strict=True):
        loses_tie = number in tied and isinstance(leaf, np.generic)
        new_leaves.append(np.asarray(leaf) if loses_tie else leaf)
    return new_leaves


def another(leaf: Any) -> Any:
    """Copies a leaf that carries identity, buffer included. A reference becomes a new reference to a copy."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=leaf.weak_type,  # pyright: ignore
        )
    if isinstance(leaf, jax.Ref):
        return jax.new_ref(leaf[...])
    return jnp.copy(leaf)
