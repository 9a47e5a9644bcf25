"""Small files that hold a bit of everything, to be damaged: most changes to them hit something that matters."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import sharedtree as st
from sharedtree.serialise.container import _writing as _container

from . import strategies


@dataclasses.dataclass(frozen=True)
class Good:
    """A model, and the file that holds it."""

    tree: Any
    data: bytes


def _tied() -> Any:
    shared = {"w": jnp.arange(6.0).reshape(2, 3), "n": np.arange(16.0)}
    layer = strategies.make(strategies.Layer, weight=shared, child=[shared, (1, None)], activation=jax.nn.relu)
    return [layer, layer, layer.double, {"again": layer}]


def _values() -> Any:
    make = strategies.make
    return [
        {1: {strategies.Key(2)}, "x": strategies.Mode.LOG, (1, "a"): strategies.Color.RED, None: -0.0},
        [2**100, float("nan"), 1j, "\ud83d", b"\xff", ..., slice(1, None), range(5), frozenset({1, 2})],
        strategies.Pair(1, make(strategies.Slotted, a=1, b=2)), strategies.Registered((np.ones(2), 3), ["aux"]),
        make(strategies.Config, rate=[1.5], steps=3, scale=1, derived=None, undeclared=2),
        functools.partial(jnp.add, 1), jax.tree_util.Partial(jnp.add, 1, x=2),
        jax.tree_util.tree_structure([1, {"a": 2}]),
        jax.ShapeDtypeStruct((2,), jnp.float32), jax.sharding.PartitionSpec("x"), np.float32(2), np.dtype(">i2"),
        object(), bytearray(b"ab"),
    ]  # fmt: skip


def _arrays() -> Any:
    names = "bool int8 uint16 int32 float16 float32 float64 complex64 complex128 >f4 M8[ns]"
    dtypes = [*map(np.dtype, names.split()), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4)]
    of_numpy = [np.ones((2, 2)).astype(dtype) for dtype in dtypes]
    of_jax = [jnp.zeros((0, 3)), jnp.float32(1), jnp.asarray(2.0), jax.random.key(1), jnp.arange(64, dtype="i4")]
    return [of_numpy, *of_jax]


def _state() -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")


def good_files() -> list[Good]:
    """Small ones, since most changes should hit something that matters."""
    trees = [{"w": np.arange(3, dtype=np.int32)}, _tied(), _values(), _arrays(), _state(), 7]
    files = [Good(tree, st.to_bytes(tree)) for tree in trees]
    with mock.patch.object(_container, "MAX_INLINE_MANIFEST", 0):  # a manifest in a tensor
        files.append(Good(trees[1], st.to_bytes(trees[1])))
    return files
