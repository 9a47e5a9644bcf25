"""Makes the pictures of `showing.md` anew: `python docs/pictures.py`. Needs the extra `show`."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

FOLDER = pathlib.Path(__file__).parent / "pictures"


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear


def transformer(num_blocks, size=64, words=1_000):
    """A language model whose embedding is its output layer, as shapes: nothing is computed."""

    def make():
        key = jax.random.key(0)
        embed = eqx.nn.Embedding(words, size, key=key)
        blocks = [
            Block(
                eqx.nn.MultiheadAttention(4, size, key=key),
                eqx.nn.LayerNorm(size),
                eqx.nn.MLP(size, size, 4 * size, 1, key=key),
            )
            for _ in range(num_blocks)
        ]
        return Transformer(embed, blocks, eqx.nn.Linear(size, words, use_bias=False, key=key))

    return st.tie(eqx.filter_eval_shape(make), lambda model: (model.embed.weight, model.head.weight))


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array


def pictures():
    """File name → drawing."""
    weight = jnp.ones((5, 3))
    net = Net(weight, weight)
    return {
        "tied.svg": st.draw(net),
        "untied.svg": st.draw(st.untie(net)),
        "transformer.svg": st.draw(transformer(24)),
    }


if __name__ == "__main__":
    for name, drawing in pictures().items():
        drawing.save(FOLDER / name)
