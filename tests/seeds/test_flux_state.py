"""What the documentation of `Flux.state` and `Flux.loadmodel!` shows, with Equinox's layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st


class Dense(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: object

    def __call__(self, x):
        y = self.weight @ x
        return self.activation(y if self.bias is None else y + self.bias)


class Chain(eqx.Module):
    layers: tuple

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def dense(inputs, outputs, activation=jnp.positive, value=1.0, bias=0.0):
    return Dense(jnp.full((outputs, inputs), value), jnp.full(outputs, bias), activation)


def two_layers(value=1.0):
    return Chain((dense(1, 2, jnp.tanh, value), dense(2, 1, value=value)))


def test_the_state_of_a_chain():
    state = st.state(two_layers())
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, state)) == {
        "layers": (
            {"weight": [[1.0], [1.0]], "bias": [0.0, 0.0], "activation": ()},
            {"weight": [[1.0, 1.0]], "bias": [0.0], "activation": ()},
        )
    }


def test_a_model_gets_the_state_of_another():
    source, target = two_layers(), two_layers(value=2.0)
    x = jnp.array([0.5])
    assert not jnp.array_equal(source(x), target(x))
    loaded = st.load_state(target, st.state(source))
    np.testing.assert_array_equal(loaded(x), source(x))
    np.testing.assert_array_equal(target(x), two_layers(value=2.0)(x))


def test_activations_need_not_match():
    source = Chain((dense(1, 2, jax.nn.relu, 3.0), dense(2, 1)))
    loaded = st.load_state(two_layers(), st.state(source))
    assert loaded.layers[0].activation is jnp.tanh
    np.testing.assert_array_equal(loaded.layers[0].weight, [[3.0], [3.0]])


def test_other_fields_other_sizes_and_other_lengths_are_errors():
    state = st.state(two_layers())
    with pytest.raises(st.StructureMismatchError, match=r"`\.layers\[0\]\.weight`.*float32\[2, 1\].*float32\[2, 3\]"):
        st.load_state(two_layers(), st.state(Chain((dense(3, 2), dense(2, 1)))))
    with pytest.raises(st.StructureMismatchError, match=r"`\.layers`: the model has 2 entries, the state 1"):
        st.load_state(two_layers(), {"layers": state["layers"][:1]})
    with pytest.raises(st.StructureMismatchError, match=r"`\.layers\[0\]\.bias`: the state lacks it"):
        lacking = {name: value for name, value in state["layers"][0].items() if name != "bias"}
        st.load_state(two_layers(), {"layers": (lacking, state["layers"][1])})
    with pytest.raises(st.StructureMismatchError, match=r"`\.layers\[1\]\.bias`.*the state None"):
        source = Chain((dense(1, 2), Dense(jnp.ones((1, 2)), None, jnp.positive)))
        st.load_state(two_layers(), st.state(source))


def test_a_tied_parameter_is_not_loaded_twice():
    weight = jnp.zeros((2, 2))
    tied = Chain((Dense(weight, None, jnp.tanh), Dense(weight, None, jnp.tanh)))
    other = Chain((Dense(weight + 1, None, jnp.tanh), Dense(weight + 2, None, jnp.tanh)))
    with pytest.raises(st.SharingMismatchError) as caught:
        st.load_state(tied, st.state(other))
    assert caught.value.paths == (".layers[0].weight", ".layers[1].weight")
    assert st.ties(st.load_state(tied, st.state(tied))) == st.ties(tied)


def test_the_trainable_part():
    model = Chain((dense(1, 2, jnp.tanh), 3, jnp.arange(2)))
    state = st.state(model, keep=eqx.is_inexact_array)
    assert state["layers"][1:] == ((), ())
    loaded = st.load_state(model, jax.tree.map(lambda x: x + 1, state))
    np.testing.assert_array_equal(loaded.layers[0].weight, [[2.0], [2.0]])
    assert loaded.layers[1] == 3
    assert loaded.layers[2] is model.layers[2]


def test_a_large_model_is_not_copied():
    model = [jnp.ones(1000) for _ in range(50)]
    loaded = st.load_state(model, st.state(model))
    assert all(a is b for a, b in zip(loaded, model, strict=True))
