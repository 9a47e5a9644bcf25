"""`state` and `load_state` of Flax NNX's modules, variables and optimizers."""

import json
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st

pytest.importorskip("flax", minversion="0.12.1")  # before, some of these objects could not be made
nnx: Any = pytest.importorskip("flax.nnx")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.again = self.linear
        self.layers = nnx.List([self.linear, nnx.Linear(3, 3, rngs=rngs)])
        self.empty = nnx.List([])
        self.kernel = self.linear.kernel
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rate = 0.25
        self.tied = nnx.Param(self.linear.bias[...])


def test_nnx_modules():
    net = Net(nnx.Rngs(0))
    state = st.state(net)
    assert state["linear"] is state["again"] is state["layers"][0]
    assert state["kernel"] is state["linear"]["kernel"] is net.kernel[...]
    assert state["empty"] == []
    assert state["rate"] == 0.25
    assert state["linear"]["in_features"] == 2
    assert state["linear"]["dot_general"] == ()
    assert not [name for name in state if name.startswith("_")]
    other = Net(nnx.Rngs(1))
    other.rate = 0.75
    loaded = st.load_state(net, st.state(other))
    assert loaded.linear is loaded.again is loaded.layers[0]
    assert loaded.kernel is loaded.linear.kernel
    assert type(loaded.kernel) is nnx.Param
    assert loaded.rate == 0.75
    assert loaded.rate is not net.rate
    x = jnp.ones((1, 2))
    np.testing.assert_array_equal(loaded.layers[1](loaded.linear(x)), other.layers[1](other.linear(x)))


def test_the_arrays_are_where_nnx_has_them():
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    pure = nnx.to_pure_dict(nnx.state(linear))
    state = st.state(linear, keep=eqx.is_array)
    assert {name: value for name, value in state.items() if not isinstance(value, tuple)}.keys() == pure.keys()
    assert all(state[name] is value for name, value in pure.items())
    assert st.state(nnx.state(linear)) == pure
    loaded, report = st.load_state(linear, st.state(nnx.state(linear)), strict=False)
    assert sorted(report.loaded) == [".bias.value", ".kernel.value"]
    assert loaded.kernel[...] is linear.kernel[...]
    optimizer = nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param)
    state = st.state(optimizer)
    assert state["tx"] == {"init": (), "update": ()}
    assert state["step"].shape == ()
    optimizer.step[...] = jnp.array(1, jnp.uint32)
    loaded = st.load_state(optimizer, st.state(optimizer))
    assert int(loaded.step[...]) == 1
    assert st.load_state(optimizer, state).step[...] is state["step"]


def test_two_variables_with_one_array_and_one_with_a_number():
    shared = jnp.ones(2)
    model = {"a": nnx.Param(shared), "b": nnx.Param(shared)}
    state = st.state(model)
    assert state["a"] is state["b"] is shared
    loaded = st.load_state(model, state)
    assert loaded["a"] is not loaded["b"]
    assert loaded["a"][...] is loaded["b"][...] is shared
    with pytest.raises(st.errors.SharingMismatchError, match="in the state only"):
        st.load_state({"a": nnx.Param(jnp.ones(2)), "b": nnx.Param(jnp.ones(2))}, state)
    # A number is one value after storage.
    count = nnx.Variable(10**6)
    model = {"a": count, "b": count}
    state = json.loads(json.dumps({"a": 10**6, "b": 10**6}))
    assert st.load_state(model, state)["a"] is not count
    with pytest.raises(st.errors.SharingMismatchError, match="in the model only"):
        st.load_state(model, {"a": 1, "b": 2})
