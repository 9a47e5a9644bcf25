"""Prints what importing the package imports."""

import sys

import equinox

packages = lambda: {name.partition(".")[0] for name in sys.modules}
before = packages()
import sharedtree

print(sum(name.partition(".")[0] == "sharedtree" for name in sys.modules))
print(*packages() - before)
print(*packages())
from jax._src import xla_bridge

print(xla_bridge.backends_are_initialized())
import jax

mlp = equinox.nn.MLP(1, 1, 1, 1, key=jax.random.key(0))
print(sharedtree.from_bytes(sharedtree.to_bytes(mlp)).activation is mlp.activation)
print(*[name for name in sys.modules if name.startswith("sharedtree.compat")])
