"""Models of treex and trees of treeo, and whether two are the same but for the objects themselves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st
from sharedtree.compat import treeo as to, treex as tx

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)
IMAGE = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 8, 3)), jnp.float32)


class Marked(tx.TreePart):
    """A kind of the user's own."""


class Block(tx.Module):
    """A module of the user's, with a layer at two places, undeclared attributes, and metadata of its own kind."""

    first: tx.Linear
    again: tx.Linear
    scale: Any = Marked.node()
    hidden: Any = to.static(None, opaque=True)

    def __init__(self):
        super().__init__()
        self.first = self.again = tx.Linear(4)
        self.scale = jnp.full(4, 0.5)
        self.hidden = np.arange(3)
        self.activation = jax.nn.gelu
        self.table = (1, "a", None)

    def __call__(self, x):
        return self.activation(self.again(self.first(x)) * self.scale)


@dataclasses.dataclass
class Pair(to.Tree, to.Extensions):
    """A tree of treeo's, all of whose attributes are declared."""

    left: Any = to.node()
    right: Any = to.node()
    note: Any = to.static("none")


def model_of(make, inputs):
    return make().init(0) if inputs is None else make().init(0, inputs)


LAYERS = {
    "Linear": (lambda: tx.Linear(3), X),
    "Conv": (lambda: tx.Conv(3, (3, 3)), IMAGE),
    "Embed": (lambda: tx.Embed(5, 3), jnp.array([1, 2])),
    "BatchNorm": (lambda: tx.BatchNorm(), X),
    "LayerNorm": (lambda: tx.LayerNorm(), X),
    "GroupNorm": (lambda: tx.GroupNorm(num_groups=2), X),
    "Dropout": (lambda: tx.Dropout(0.5), None),
    "Flatten": (lambda: tx.Flatten(), IMAGE),
    "KeySeq": (lambda: tx.KeySeq(), None),
    "MLP": (lambda: tx.MLP([4, 3]), X),
    "Lambda": (lambda: tx.Lambda(jax.nn.relu), X),
    "Sequential": (lambda: tx.Sequential(tx.Linear(3), jnp.tanh, tx.Dropout(0.5), tx.BatchNorm(), tx.MLP([3, 2])), X),
    "Block": (lambda: Block(), X),
}


def assert_same(a, b, path="", seen=None):
    """Raises unless `b` is a copy of `a`: each attribute, metadata by what it holds, and what is one object."""
    there, back = seen = seen or ({}, {})
    assert type(a) is type(b), path
    if isinstance(a, to.Tree | jax.Array | np.ndarray):
        assert there.setdefault(id(a), b) is b, path
        assert back.setdefault(id(b), a) is a, path
    if isinstance(a, to.Tree | to.FieldMetadata | to.Hashable | tx.Named):
        a, b = vars(a), vars(b)
    if isinstance(a, jax.Array | np.ndarray):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (path, a.keys() ^ b.keys())
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}", seen)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]", seen)
    elif not isinstance(a, to.Nothing):
        assert a == b, path


def through_bytes(tree, **options):
    jax.tree.leaves(tree)  # treeo notes metadata of what is undeclared when it flattens
    return st.from_bytes(st.to_bytes(tree), **options)
