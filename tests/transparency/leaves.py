"""Which leaves go through which transform, in which place, and what is done to them there."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.transparency.outcome import (
    LEAVES,
    PLACES,
    TRANSFORMS,
    Data,
    Model,
    Registered,
    changed,
    loss_of,
    separate,
)

UNTRACEABLE = ("string", "function", "numpy strings")  # what JAX refuses is static in any module
GRADS = (jax.grad, jax.value_and_grad, eqx.filter_grad, eqx.filter_value_and_grad)
JITS = (jax.jit, eqx.filter_jit)
NUMBERS = ("python float", "python int", "python bool", "python complex")
SCALARS = (*NUMBERS, "float scalar", "weak scalar", "typed key", "numpy scalar", "numpy int scalar")
NOT_IN_A_LOSS = ("python complex", "string", "function")
WITHOUT_TANGENTS = ("int array", "bool array", "typed key", "typed keys", "raw key", "numpy ints", "numpy int scalar")
NOT_REAL = (*NUMBERS[1:3], *WITHOUT_TANGENTS)


def mixture(tree: Any, constants: Any) -> Any:
    """The tree unchanged, a changed version of it with constants, and the tree again."""
    return tree, {"new": jax.tree.map(changed, tree), "c": constants}, tree


CONSTANTS = {
    None: (2, 1.5, np.arange(2), None),
    "jax": (2, Registered(1.5), Data(jnp.arange(2))),
    "equinox": (jnp.arange(2), Model(1.5), Model(jnp.tanh)),
}


def each_mixed(module: str | None, parts: slice = slice(3)) -> Any:
    """A function that does that for each of several trees, or returns only some of the three parts."""
    constants = {leaf: separate(CONSTANTS[module]) for leaf in LEAVES}  # which are not to be one in two results
    return lambda trees: {leaf: mixture(tree, constants[leaf])[parts] for leaf, tree in trees.items()}


# To JAX a bare deque is a leaf, whatever is in it.
IN_A_DEQUE = ("python float", "string", "float array", "typed key", "numpy array")


def apart(transform: Any, place: str) -> tuple[str, ...]:
    """Names of leaves that do not go into one call with the others: vanilla refuses them, or their length differs."""
    filters = transform.__name__.startswith("filter_") or PLACES[place].module == "equinox"
    if place == "deque":
        return tuple(LEAVES)
    if transform in GRADS:
        return NOT_IN_A_LOSS if filters else (*UNTRACEABLE, *NOT_REAL)
    if transform in (jax.vmap, eqx.filter_vmap):
        return (*UNTRACEABLE, *SCALARS, "raw key")
    return ("numpy strings",) if filters else UNTRACEABLE


TRIED = {name: t for name, t in TRANSFORMS.items() if name not in ("jax.grad", "eqx.filter_value_and_grad")}


def put(place: str, leaves: Iterable[str]) -> dict[str, Any]:
    """New leaves of these names, each in a place of its own."""
    return {leaf: separate(PLACES[place].put(LEAVES[leaf]())) for leaf in leaves}


def of_one(transform: Any, place: str) -> Any:
    """The function that a transform is applied to: a loss if it differentiates."""
    return loss_of if transform in GRADS else each_mixed(PLACES[place].module)
