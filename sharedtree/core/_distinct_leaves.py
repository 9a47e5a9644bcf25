"""Leaves that JAX returned as one object although they are two, and those that are one and no object.

Eager transforms hand out one array for two results where they can: the gradients of `a + b` with respect to both are
one object. As leaves of a DAG that would be a tie that nobody made, so the second one becomes a copy.

NumPy makes numbers of what it computes from arrays without dimensions, and a number carries no identity. Where a tie
was, that would be a tie lost, so it becomes an array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._by_identity import IdentitySet
from ._structure import Structure, with_several_edges
from ._traced_leaves_and_identity import carries_identity
from ._trees_taken_apart import Walked


def distinct(leaves: Sequence[Any]) -> Sequence[Any]:
    """The leaves, each an object of its own. Copies only what occurs twice; cost otherwise one set of ids."""
    if len(set(map(id, leaves))) == len(leaves):  # alive in `leaves`
        return leaves
    seen = IdentitySet()
    return [leaf if seen.add(leaf) or not carries_identity(leaf) else another(leaf) for leaf in leaves]


def with_identity(leaves: Sequence[Any], tree: Walked | Structure) -> Sequence[Any]:
    """The leaves, with arrays for those of NumPy's numbers that are tied. Costs a check of each type if there are none.

    Args:
        leaves: of a tree.
        tree: without its leaves.
    """
    if not any(isinstance(leaf, np.generic) for leaf in leaves):
        return leaves
    tied = with_several_edges(tree.records, tree.root)
    return [
        np.asarray(leaf) if number in tied and isinstance(leaf, np.generic) else leaf
        for number, leaf in zip(tree.leaf_numbers, leaves, strict=True)
    ]


def another(leaf: Any) -> Any:
    """A new array with the content of `leaf`; of a reference, a new reference to a copy. Copies the buffer."""
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
