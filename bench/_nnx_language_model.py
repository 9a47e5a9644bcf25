"""The demo's language model as a network of `flax.nnx`, with the same numbers in it and the same computation."""

from typing import Any

import jax
import jax.numpy as jnp

from sharedtree.cli._demo import LanguageModel, rotated

from ._kinds import imported


def nnx_language_model(model: LanguageModel) -> Any:
    """The same network, tied in the same way. It takes over the arrays of `model`.

    Each module works on a whole window: (context, width) → (context, width). The last one is the tied table.
    """
    nnx = imported("flax.nnx")

    class Table(nnx.Module):
        def __init__(self, like: Any) -> None:
            self.weight = nnx.Param(like.weight)

        def vectors(self, tokens: jax.Array) -> jax.Array:
            return self.weight[...][tokens]

        def logits(self, features: jax.Array) -> jax.Array:
            return features @ self.weight[...].T

    class Linear(nnx.Module):
        def __init__(self, like: Any) -> None:
            self.weight = nnx.Param(like.weight)
            self.bias = None if like.bias is None else nnx.Param(like.bias)

        def __call__(self, features: jax.Array) -> jax.Array:
            made = features @ self.weight[...].T
            return made if self.bias is None else made + self.bias[...]

    class Norm(nnx.Module):
        def __init__(self, like: Any) -> None:
            self.weight = nnx.Param(like.weight)
            self.bias = nnx.Param(like.bias)
            self.eps = like.eps

        def __call__(self, features: jax.Array) -> jax.Array:
            mean = features.mean(-1, keepdims=True)
            variance = jnp.maximum(features.var(-1, keepdims=True), 0)
            return (features - mean) * jax.lax.rsqrt(variance + self.eps) * self.weight[...] + self.bias[...]

    class Attention(nnx.Module):
        def __init__(self, like: Any) -> None:
            self.inward = Linear(like.inward)
            self.outward = Linear(like.outward)
            self.heads = like.heads

        def __call__(self, features: jax.Array) -> jax.Array:
            context, width = features.shape
            parts = self.inward(features).reshape(context, 3, self.heads, width // self.heads)
            queries, keys, values = jnp.moveaxis(parts, 1, 0)
            found = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
            return self.outward(found.reshape(context, width))

    class Block(nnx.Module):
        def __init__(self, like: Any) -> None:
            self.attention = Attention(like.attention)
            self.attention_norm = Norm(like.attention_norm)
            self.inner = Linear(like.perceptron.layers[0])
            self.outer = Linear(like.perceptron.layers[1])
            self.perceptron_norm = Norm(like.perceptron_norm)

        def __call__(self, features: jax.Array) -> jax.Array:
            features = features + self.attention(self.attention_norm(features))
            return features + self.outer(jax.nn.gelu(self.inner(self.perceptron_norm(features))))

    class Network(nnx.Module):
        def __init__(self, like: LanguageModel) -> None:
            self.embed = Table(like.embed)
            self.blocks = nnx.List([Block(block) for block in like.blocks])
            self.norm = Norm(like.norm)
            self.head = self.embed

        def __call__(self, tokens: jax.Array) -> jax.Array:
            features = self.embed.vectors(tokens)
            for block in self.blocks:
                features = block(features)
            return self.head.logits(self.norm(features))

    return Network(model)
