"""A small language model with tied weights: the layer that reads bytes is the layer that writes them.

An embedding turns a byte into a vector. The output layer turns a vector into a score for each byte, by comparing it
with a vector for each byte. Language models therefore often use one table for both (Press and Wolf, "Using the Output
Embedding to Improve Language Models", 2017): fewer parameters, less optimizer state, and each step teaches both uses.

With `sharedtree` that takes one assignment, `self.head = self.embed`, and nothing else in this file knows about it.
The rest is the usual transformer: causal self-attention and a perceptron in each block, both on normalised input and
added to the residual stream.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ._help_texts import NUM_BYTES


class Sizes(NamedTuple):
    """How large the model is, and what it is trained on at a time.

    Attributes:
        width: of the vectors between the layers.
        heads: of each attention; each gets `width // heads` numbers, which must be even.
        blocks: how many.
        context: the number of bytes that the model is trained to look at.
        batch: the number of windows of the text in one step.
    """

    width: int = 128
    heads: int = 4
    blocks: int = 2
    context: int = 64
    batch: int = 16


class Embedding(eqx.Module):
    """A table with a vector for each byte, to be read both ways.

    Attributes:
        weight: of shape (256, width).
    """

    weight: jax.Array

    def __init__(self, width: int, *, key: jax.Array) -> None:
        # Small, since a vector here is compared with itself there: at the usual scale of an embedding the model would
        # start out sure that each byte follows itself.
        self.weight = 0.02 * jax.random.normal(key, (NUM_BYTES, width))

    def vectors(self, tokens: jax.Array) -> jax.Array:
        """The vectors of bytes: (context,) integers → (context, width)."""
        return self.weight[tokens]

    def logits(self, features: jax.Array) -> jax.Array:
        """How well each byte's vector fits: (context, width) → (context, 256)."""
        return features @ self.weight.T


class Attention(eqx.Module):
    """Causal self-attention: each position looks at itself and at those before it.

    Attributes:
        inward: makes queries, keys and values, in one multiplication.
        outward: mixes what the heads found.
        heads: how many there are.
    """

    inward: eqx.nn.Linear
    outward: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: jax.Array) -> None:
        inward_key, outward_key = jax.random.split(key)
        self.inward = eqx.nn.Linear(width, 3 * width, use_bias=False, key=inward_key)
        self.outward = eqx.nn.Linear(width, width, use_bias=False, key=outward_key)
        self.heads = heads

    def __call__(self, features: jax.Array) -> jax.Array:
        """Shape (context, width) → (context, width)."""
        context, width = features.shape
        parts = jax.vmap(self.inward)(features).reshape(context, 3, self.heads, width // self.heads)
        queries, keys, values = jnp.moveaxis(parts, 1, 0)
        found = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
        return jax.vmap(self.outward)(found.reshape(context, width))


class Block(eqx.Module):
    """Attention and then a perceptron, each added to what it reads.

    Attributes:
        attention: lets positions exchange what they know.
        attention_norm: normalises what the attention reads.
        perceptron: works on each position by itself.
        perceptron_norm: normalises what the perceptron reads.
    """

    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    perceptron: eqx.nn.MLP
    perceptron_norm: eqx.nn.LayerNorm

    def __init__(self, width: int, heads: int, *, key: jax.Array) -> None:
        attention_key, perceptron_key = jax.random.split(key)
        self.attention = Attention(width, heads, key=attention_key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.perceptron = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=perceptron_key)
        self.perceptron_norm = eqx.nn.LayerNorm(width)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Shape (context, width) → (context, width)."""
        features = features + self.attention(jax.vmap(self.attention_norm)(features))
        return features + jax.vmap(self.perceptron)(jax.vmap(self.perceptron_norm)(features))


class LanguageModel(eqx.Module):
    """Predicts the next byte at each position of a text.

    Attributes:
        embed: turns bytes into vectors.
        blocks: the layers in between.
        norm: normalises what the last block wrote.
        head: turns vectors into scores for the next byte. The very object that `embed` is.

    Example:
        >>> import jax, sharedtree as st
        >>> model = LanguageModel(Sizes(width=8, heads=2, blocks=1), key=jax.random.key(0))
        >>> model.embed is model.head
        True
        >>> [tie.paths for tie in st.ties(model)]
        [('.embed', '.head')]
    """

    embed: Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: Embedding

    def __init__(self, sizes: Sizes, *, key: jax.Array) -> None:
        embed_key, *block_keys = jax.random.split(key, 1 + sizes.blocks)
        self.embed = Embedding(sizes.width, key=embed_key)
        self.blocks = [Block(sizes.width, sizes.heads, key=block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(sizes.width)
        self.head = self.embed  # this is all that it takes to tie them

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits for the byte after each position: (context,) integers → (context, 256)."""
        features = self.embed.vectors(tokens)
        for block in self.blocks:
            features = block(features)
        return self.head.logits(jax.vmap(self.norm)(features))


def rotated(vectors: jax.Array) -> jax.Array:
    """Turns vectors by angles that grow with their position, so that attention sees how far apart two of them are.

    Rotary embedding: Su et al., "RoFormer", 2021.

    Args:
        vectors: of shape (context, heads, size), with an even size.

    Returns:
        An array of that shape.
    """
    context, _, size = vectors.shape
    positions = jnp.arange(context, dtype=vectors.dtype)
    frequencies = 10_000.0 ** (-jnp.arange(0, size, 2, dtype=vectors.dtype) / size)
    angles = (positions[:, None] * frequencies)[:, None]
    x, y = jnp.split(vectors, 2, axis=-1)
    return jnp.concatenate([x * jnp.cos(angles) - y * jnp.sin(angles), x * jnp.sin(angles) + y * jnp.cos(angles)], -1)
