"""Every layer of Flax NNX under our transforms, in place: value and state are those of NNX's own."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")

# Its own layer `RoPE` reads `.value`.
pytestmark = pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")

# What is a module, but no layer: the base classes and the containers of others.
NO_LAYERS = {"Module", "RNNCellBase", "Dict", "List"}


def rngs():
    return nnx.Rngs(0)


def x(*shape):
    return jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)


def cell(cls):
    """A cell from its own first carry, which may be one of several arrays."""

    def make():
        return cls(2, 3, rngs=rngs())

    def call(layer, inputs):
        carry = jax.tree.map(lambda shape: jnp.full(shape.shape, 0.25), jax.eval_shape(lambda: _carry(make(), inputs)))
        return layer(carry, inputs)

    return make, x(2, 2), call


def _carry(layer, inputs):
    return layer.initialize_carry(inputs.shape, nnx.Rngs(0))


def one(make, *shape):
    return make, x(*shape), None


LAYERS = {
    "Sequential": one(lambda: nnx.Sequential(nnx.Linear(2, 3, rngs=rngs()), jax.nn.relu), 2, 2),
    "PReLU": one(lambda: nnx.PReLU(), 2, 3),
    "MultiHeadAttention": (
        lambda: nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, deterministic=False, decode=False, rngs=rngs()),
        x(2, 3, 4),
        None,
    ),
    "RoPE": one(lambda: nnx.RoPE(embedding_size=4, max_seq_len=5), 2, 3, 1, 4),
    "LSTMCell": cell(nnx.LSTMCell),
    "GRUCell": cell(nnx.GRUCell),
    "OptimizedLSTMCell": cell(nnx.OptimizedLSTMCell),
    "SimpleCell": cell(nnx.SimpleCell),
    "RNN": one(lambda: nnx.RNN(nnx.SimpleCell(2, 3, rngs=rngs())), 2, 3, 2),
    "Bidirectional": one(
        lambda: nnx.Bidirectional(*[nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(seed))) for seed in (0, 1)]), 2, 3, 2
    ),
    "Conv": one(lambda: nnx.Conv(2, 3, 2, rngs=rngs()), 2, 4, 2),
    "ConvTranspose": one(lambda: nnx.ConvTranspose(2, 3, 2, rngs=rngs()), 2, 4, 2),
    "Embed": (lambda: nnx.Embed(5, 3, rngs=rngs()), jnp.array([[0, 3], [4, 3]]), None),
    "Linear": one(lambda: nnx.Linear(2, 3, rngs=rngs()), 2, 2),
    "LinearGeneral": one(lambda: nnx.LinearGeneral((2, 2), 3, axis=(-2, -1), rngs=rngs()), 2, 2, 2),
    "Einsum": one(lambda: nnx.Einsum("ab,bc->ac", (2, 3), (3,), rngs=rngs()), 2, 2),
    "LoRA": one(lambda: nnx.LoRA(2, 1, 3, base_module=nnx.Linear(2, 3, rngs=rngs()), rngs=rngs()), 2, 2),
    "LoRALinear": one(lambda: nnx.LoRALinear(2, 3, lora_rank=1, rngs=rngs()), 2, 2),
    "BatchNorm": one(lambda: nnx.BatchNorm(3, rngs=rngs()), 2, 3),
    "LayerNorm": one(lambda: nnx.LayerNorm(3, rngs=rngs()), 2, 3),
    "RMSNorm": one(lambda: nnx.RMSNorm(3, rngs=rngs()), 2, 3),
    "GroupNorm": one(lambda: nnx.GroupNorm(4, num_groups=2, rngs=rngs()), 2, 4),
    "InstanceNorm": one(lambda: nnx.InstanceNorm(3, rngs=rngs()), 2, 4, 3),
    "SpectralNorm": one(lambda: nnx.SpectralNorm(nnx.Linear(2, 3, rngs=rngs()), rngs=rngs()), 2, 2),
    "WeightNorm": one(lambda: nnx.WeightNorm(nnx.Linear(2, 3, rngs=rngs()), rngs=rngs()), 2, 2),
    "Dropout": one(lambda: nnx.Dropout(0.5, rngs=rngs()), 2, 3),
}
"""Layer → how it is made, an input, and how it is called if not with the input alone."""


def layers_of_nnx():
    return {name for name, cls in vars(nnx).items() if inspect.isclass(cls) and issubclass(cls, nnx.Module)} - NO_LAYERS


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


def arrays(tree):
    """The arrays of anything of NNX by their paths; keys as what they are made of."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(tree)) if is_graph(tree) else tree):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = jax.random.key_data(leaf) if is_key else leaf
    return found


def is_graph(tree):
    return isinstance(tree, nnx.Pytree | nnx.State)


def assert_equal(one, two):
    mine, theirs = arrays(one), arrays(two)
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, (jax.ShapeDtypeStruct, str)):
            assert mine[path] == value
        else:
            np.testing.assert_allclose(mine[path], value, rtol=1e-4, atol=1e-5, err_msg=path)


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
