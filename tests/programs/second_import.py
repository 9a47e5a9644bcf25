"""Imports the package anew, which then walks in Python."""

import sys

import jax.numpy as jnp

import sharedtree

before = sharedtree.tree.flatten([jnp.ones(2)])
for name in [name for name in sys.modules if name.partition(".")[0] == "sharedtree"]:
    del sys.modules[name]
import sharedtree
from sharedtree.core._native_or_python import engine

print(engine())
leaves, structure = sharedtree.tree.flatten([jnp.ones(2)])
print(structure, sharedtree.tree.unflatten(structure, leaves))
