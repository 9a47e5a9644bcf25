"""Checked by pyright, never run: what optimizers, averages, casts and norms return."""

from dataclasses import dataclass
from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import sharedtree as st

tx = st.optimizer(optax.sgd(0.1), wrt="decay")
assert_type(tx, optax.GradientTransformationExtraArgs)
st.optimizer(optax.sgd)  # pyright: ignore[reportArgumentType]


@dataclass
class Net:
    weight: jax.Array


net = Net(jnp.ones(2))
assert_type(st.incremental_update(net, net, 0.1), Net)
assert_type(st.tree.cast(net, jnp.bfloat16), Net)
assert_type(st.tree.norm(net), jax.Array)
st.optimizer(optax.sgd(0.1), wrt=lambda path, value: path[-1] == "weight")
