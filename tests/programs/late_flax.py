"""Imports Flax after the first walk."""

import sys

import jax.numpy as jnp

import sharedtree as st

st.tree.flatten([jnp.ones(2)])
assert not any(name.partition(".")[0] == "flax" for name in sys.modules)
from flax import nnx

model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
leaves, structure = st.tree.flatten(model)
assert st.tree.structure(st.tree.unflatten(structure, leaves)) is structure
from sharedtree.core import _classes_in_native_walk, _native_or_python

assert (nnx.Linear in _classes_in_native_walk._layouts_in_use) is (_native_or_python.native_module is not None)
