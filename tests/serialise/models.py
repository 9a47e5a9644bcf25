"""Models that are saved whole, in parts, and into templates."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np


class Block(eqx.Module):
    """A layer that can be called."""

    weight: Any
    bias: Any = None

    def __call__(self, x):
        return self.weight * x


class Model(eqx.Module):
    """A model with a static name."""

    encoder: Any
    decoder: Any
    table: Any
    name: str = eqx.field(static=True, default="m")


class Token(eqx.Module):
    """Hashed by its field."""

    name: str


def model(start=0.0, tied=True):
    """A model of NumPy and JAX arrays, whose encoder is its decoder's first block if it is tied."""
    block = Block(jnp.arange(6.0).reshape(2, 3) + start, jnp.zeros(3) + start)
    other = block if tied else Block(block.weight + 0, block.bias + 0)
    return Model(block, [other, jnp.ones(4, jnp.int32)], np.full((3, 2), start), "m")
