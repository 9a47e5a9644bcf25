"""Imports treex without some names: rows of a module and a name in it."""
# ruff: noqa: F821 -- it follows `compat_state` and `compat_attempt`

import jax.nn
import numpy

outcomes = []
for module, name, *_ in json.loads(sys.argv[1]):
    there = vars(sys.modules[module])
    held = there.pop(name)
    outcomes.append(attempt("treex"))
    there[name] = held
import jax

jax.tree_leaves = own = lambda *args: "own"  # what a library still has is its own
from sharedtree.compat import treex as tx

print(json.dumps([*outcomes, tx.optimizer.jax.tree_leaves is own]))
