"""Imports treex while threads look at JAX and NumPy, which do not change for them."""
# ruff: noqa: F821 -- it follows `compat_state`

import json
import sys
import threading

import einops
import flax.linen
import jax
import numpy
import optax
import rich.console
import rich.table
import rich.text
import typing_extensions
import yaml

import sharedtree

before, seen, stop = state(), [], threading.Event()


def look():
    while not stop.is_set():
        seen.append((hasattr(jax, "tree_map"), hasattr(numpy.lib, "arraysetops"), type(jax).__name__))


watchers = [threading.Thread(target=look) for _ in range(3)]
sys.setswitchinterval(1e-5)
[watcher.start() for watcher in watchers]
from sharedtree.compat import treex as package

stop.set()
[watcher.join() for watcher in watchers]
from importlib.metadata import distribution

import treex

import sharedtree.compat.treex as other

facts = [
    package is treex is other is sys.modules["treex"],
    package.__spec__.name == "treex",
    str(distribution("treex").locate_file("treex/__init__.py")) == package.__file__,
    set(seen) == {(False, False, "module")},
    type(sys.modules["jax"]).__name__ == type(sys.modules["flax"]).__name__ == "module",
    "unfreeze" not in dir(type(flax.linen.Dense(1).init(jax.random.key(0), jax.numpy.ones(1)))),
]
print(json.dumps([before, state(), facts]))
