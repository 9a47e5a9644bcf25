"""Makes the pictures of the README and the documentation anew: `python docs/pictures.py`. Needs the extra `show`."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

FOLDER = pathlib.Path(__file__).parent / "pictures"


class Block(eqx.Module):
    """One layer."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP


class Transformer(eqx.Module):
    """A language model."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear


def transformer(num_blocks, size=64, words=1_000):
    """A language model whose embedding is its output layer."""
    key = jax.random.key(0)
    blocks = [
        Block(
            eqx.nn.MultiheadAttention(4, size, key=key),
            eqx.nn.LayerNorm(size),
            eqx.nn.MLP(size, size, 4 * size, 1, key=key),
        )
        for _ in range(num_blocks)
    ]
    head = eqx.nn.Linear(size, words, use_bias=False, key=key)
    model = Transformer(eqx.nn.Embedding(words, size, key=key), blocks, head)
    return st.tie(model, lambda model: (model.embed.weight, model.head.weight))


class Net(eqx.Module):
    """Two fields that are one array."""

    embed: jax.Array
    head: jax.Array


def pictures():
    """File name → drawing."""
    weight = jnp.ones((5, 3))
    net = Net(weight, weight)
    return {
        "drift.svg": st.draw({"eqx.filter_jit": Net(jnp.ones((5, 3)), jnp.ones((5, 3))), "st.jit": net}),
        "tied.svg": st.draw(net),
        "untied.svg": st.draw(st.untie(net)),
        "transformer.svg": st.draw(transformer(24)),
    }


if __name__ == "__main__":
    for name, drawing in pictures().items():
        drawing.save(FOLDER / name)
