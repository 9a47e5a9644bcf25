"""Leaves that JAX returned as one object although they are two.

Eager transforms hand out one array for two results where they can: the gradients of `a + b` with respect to both are
one object. As leaves of a DAG that would be a tie that nobody made, so the second one becomes a copy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._node_types import carries_identity


def distinct(leaves: Sequence[Any]) -> Sequence[Any]:
    """The leaves, each an object of its own. Copies only what occurs twice; cost otherwise one set of ids."""
    if len(set(map(id, leaves))) == len(leaves):  # alive in `leaves`
        return leaves
    seen: set[int] = set()
    result: list[Any] = []
    for leaf in leaves:
        if id(leaf) in seen and carries_identity(leaf):  # alive in `leaves`
            result.append(another(leaf))
        else:
            seen.add(id(leaf))  # alive in `leaves`
            result.append(leaf)
    return result


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
