"""Imports treex where one of its own imports fails, and then where none fails."""
# ruff: noqa: F821 -- it follows `compat_state`

import json
import sys
from importlib.abc import MetaPathFinder

import einops
import flax.linen
import numpy
import optax
import rich.console
import yaml

import sharedtree


class Fault(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "yaml":
            raise RuntimeError("a fault")


before = state()
del sys.modules["yaml"]  # which treex.utils imports, in the middle
sys.meta_path.insert(0, Fault())
for _ in range(2):
    try:
        from sharedtree.compat import treex
    except RuntimeError as error:
        assert str(error) == "a fault"
    else:
        raise AssertionError
del sys.meta_path[0]
after = state()
from sharedtree.compat import treex as tx
from sharedtree.core._node_types import AUX_CONVERSIONS

works = tx.Linear(2).init(0, numpy.ones((1, 1))).kernel.shape == (1, 2)
print(json.dumps([before, after, works and len(AUX_CONVERSIONS) == 1]))
