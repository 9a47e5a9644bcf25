"""Uses a view before and after Flax is imported."""

import sys

import jax.numpy as jnp

import sharedtree as st

params = st.tie({"a": jnp.ones((2, 3)), "b": jnp.zeros((3, 2))}, lambda p: (p["a"], p["b"]), through=jnp.transpose)
assert st.unwrap(params)["b"].shape == (3, 2)
assert not [name for name in sys.modules if name.partition(".")[0] == "flax"]
import flax.linen as nn

params = st.tree.map(lambda x: x, params)
out = nn.Dense(2, use_bias=False).apply({"params": {"kernel": params["b"]}}, jnp.ones((1, 3)))
assert out.tolist() == [[3.0, 3.0]]
