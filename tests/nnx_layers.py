"""Every layer of Flax NNX, with arguments that make a small one, and an input."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx: Any = pytest.importorskip("flax.nnx")


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
    """A layer that is called with one array of this shape."""
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
    """The names of all layers that NNX has."""
    return {name for name, cls in vars(nnx).items() if inspect.isclass(cls) and issubclass(cls, nnx.Module)} - NO_LAYERS


def arrays(tree):
    """The arrays of anything of NNX by their paths. Of a key, the numbers that it is made of."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(tree)) if is_graph(tree) else tree):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = jax.random.key_data(leaf) if is_key else leaf
    return found


def is_graph(tree):
    return isinstance(tree, nnx.Pytree | nnx.State)


def assert_equal(one, two):
    """Compares the arrays of two models, states or results, path by path."""
    mine, theirs = arrays(one), arrays(two)
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, (jax.ShapeDtypeStruct, str)):
            assert mine[path] == value
        else:
            np.testing.assert_allclose(mine[path], value, rtol=1e-4, atol=1e-5, err_msg=path)
