"""`state(tree, keep=...)`: the filters that every other function takes, along static attributes, too."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sharedtree as st
from sharedtree.tree._plain_data import _kept_leaves
from tests.strategies import Mutable, Pair, tower

W, V, U = jnp.arange(2.0), jnp.arange(3.0), jnp.arange(4.0)


class Named(eqx.Module):
    weight: Any
    bias: Any
    name: str = eqx.field(static=True, default="layer")


def named():
    shared = Named(W, V, "shared")
    return {"first": shared, "list": [U, 3, "text"], "last": Pair(shared, jnp.array(2))}


def kept_paths(state):
    """The paths of what a state keeps, worked out by hand from the nested data."""
    if isinstance(state, dict):
        return {(key, *rest) for key, part in state.items() for rest in kept_paths(part)}
    if isinstance(state, list):
        return {(i, *rest) for i, part in enumerate(state) for rest in kept_paths(part)}
    return set() if isinstance(state, tuple) and state == () else {()}


SHARED = [("first",), ("last", "first")]
EVERYWHERE = lambda *names: {(*path, name) for path in SHARED for name in names}

KEEP = {
    "everything": (..., EVERYWHERE("weight", "bias", "name") | {("list", i) for i in range(3)} | {("last", "second")}),
    "nothing": (False, set()),
    "a class of modules": (Named, EVERYWHERE("weight", "bias", "name")),
    "a class of values": (str, EVERYWHERE("name") | {("list", 2)}),
    "a function of a path": (lambda path, value: path[-1] == "bias", EVERYWHERE("bias")),
    "a static attribute": (lambda path, value: path[-1] == "name", EVERYWHERE("name")),
    "a number by its path": (lambda path, value: path == ("list", 1), {("list", 1)}),
    "several": (
        [lambda path, value: path[-1] == "second", str],
        EVERYWHERE("name") | {("list", 2), ("last", "second")},
    ),
    "several functions of a leaf": (
        [lambda leaf: leaf is V, lambda leaf: isinstance(leaf, int)],
        EVERYWHERE("bias") | {("list", 1)},
    ),
    "a prefix": (
        {"first": Named(False, True), "list": False, "last": Pair(Named(False, True), True)},
        EVERYWHERE("bias") | {("last", "second")},
    ),
    "a prefix with a list": (
        {"first": False, "list": [False, True, lambda leaf: leaf == "text"], "last": False},
        {("list", 1), ("list", 2)},
    ),
    "nnx": (nnx.PathContains("bias"), EVERYWHERE("bias")),
}


@pytest.mark.parametrize(("keep", "expected"), KEEP.values(), ids=KEEP)
def test_keep_takes_the_filters_that_trees_take(keep, expected):
    state = st.state(named(), keep=keep)
    assert kept_paths(state) == expected
    assert state["first"] is state["last"]["first"]
    assert kept_paths(st.state(named())) == KEEP["everything"][1]


def test_keep_takes_filters_of_variables():
    class Net(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(W)
            self.mean = nnx.BatchStat(V, tag="running")

    for keep, kept in {nnx.Param: "kernel", "running": "mean", nnx.Not(nnx.Param): "mean"}.items():
        state = st.state(Net(), keep=keep)
        assert {name for name in ("kernel", "mean") if not isinstance(state[name], tuple)} == {kept}


def test_keep_of_a_leaf():
    assert st.state(W, keep=jax.Array) is W
    assert st.state(W, keep=False) == ()
    assert st.state(3, keep=lambda path, value: path == ()) == 3


def test_what_is_one_in_the_state_is_kept_at_all_of_its_paths_or_at_none():
    tied = Named(W, W)
    for tree in (tied, {"a": Named(W, V), "b": Named(V, W)}, (shared := Named(W, V), [shared])):
        with pytest.raises(st.errors.InconsistentSharingError, match="`keep` selects it at the first path") as caught:
            st.state(tree, keep=lambda path, value: path in (("weight",), ("a", "weight"), (0, "weight")))
        assert len(caught.value.paths) == 2
    # Equal numbers are values, each at its own path.
    assert st.state([1, 1], keep=lambda path, value: path == (1,)) == [(), 1]


def test_keep_that_is_no_filter():
    with pytest.raises(TypeError, match="`keep` must be a filter"):
        st.state(named(), keep=3)
    with pytest.raises(TypeError, match="A filter must take one argument"):
        st.state(named(), keep=lambda: True)
    with pytest.raises(st.errors.SharingMismatchError, match="`keep` does not fit"):
        st.state(named(), keep={"first": True, "other": True})


def test_keep_of_more_paths_than_can_be_walked(monkeypatch):
    """Up to the package's own limit the refusal takes seconds."""
    monkeypatch.setattr(_kept_leaves, "MOST_REPEATED_VISITS", 5_000)
    tree = tower(60, Mutable(a=W, b=V), lambda one, two: Mutable(one=one, two=two))
    for keep in (jax.Array, [lambda leaf: leaf is W, lambda leaf: False], (Mutable, "tag")):
        st.state(tree, keep=keep)
    with pytest.raises(ValueError, match="`keep` is a function of paths, and more than"):
        st.state(tree, keep=lambda path, value: True)
