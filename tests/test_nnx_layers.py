"""Every layer of Flax NNX under our transforms, in place: value and state are those of NNX's own."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.nnx_layers import LAYERS, assert_equal, is_graph, layers_of_nnx

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")

# Its own layer `RoPE` reads `.value`.
pytestmark = pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")


def test_no_layer_of_nnx_is_missing():
    assert LAYERS.keys() >= layers_of_nnx(), sorted(layers_of_nnx() - LAYERS.keys())


def call_of(name):
    return LAYERS[name][2] or (lambda layer, inputs: layer(inputs))


def loss_of(name):
    """The function whose gradient is taken: a loss, and what the layer gave."""
    call = call_of(name)

    def loss(layer, inputs):
        out = call(layer, inputs)
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(out)), out

    return loss


# One of each kind: running statistics, a random stream, integers, a layer in a layer, a loop in it, a list of layers.
DAILY = {"BatchNorm", "Dropout", "Embed", "LoRA", "RNN", "Sequential"}

each_layer = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in DAILY))
        for name in sorted(LAYERS.keys() & layers_of_nnx())
    ],
)


@each_layer
@pytest.mark.slow
def test_differentiated_under_jit_in_place(name):
    make, inputs, _ = LAYERS[name]
    mine, reference, loss = make(), make(), loss_of(name)
    if nnx.to_flat_state(nnx.state(mine, nnx.Param)).paths:
        differentiated = st.value_and_grad(loss, wrt=nnx.Param, has_aux=True, in_place=True)
        step, their_step = st.jit(differentiated, in_place=True), nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    else:
        without_gradient = lambda *args: (loss(*args), ())
        step, their_step = st.jit(without_gradient, in_place=True), nnx.jit(without_gradient)
    for _ in range(2):
        (found, gradient), (expected, their_gradient) = step(mine, inputs), their_step(reference, inputs)
        assert_equal(found, expected)
        assert_equal(nnx.state(gradient, nnx.Param) if is_graph(gradient) else gradient, their_gradient)
        assert_equal(mine, reference)


@each_layer
@pytest.mark.slow
def test_under_vmap_in_place(name):
    """A stack of two layers, each on an input of its own; against the two, one after the other."""
    make, inputs, _ = LAYERS[name]
    call = call_of(name)
    singles = [make(), make()]
    graphdef = nnx.graphdef(singles[0])
    states = [nnx.state(each) for each in singles]
    stacked = nnx.merge(graphdef, jax.tree.map(lambda a, b: jnp.stack([a, b]), *states))
    batch = jnp.stack([inputs, inputs[::-1]])
    out = st.jit(st.vmap(call, in_place=True), in_place=True)(stacked, batch)
    their_call = nnx.jit(call)
    expected = [their_call(each, one_input) for each, one_input in zip(singles, batch, strict=True)]
    assert_equal(out, jax.tree.map(lambda a, b: jnp.stack([a, b]), *expected))
    both = [nnx.state(each) for each in singles]
    assert_equal(nnx.state(stacked), jax.tree.map(lambda a, b: jnp.stack([a, b]), *both))
