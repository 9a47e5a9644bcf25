"""A language model of Flax NNX whose output kernel is the transpose of the embedding: tied, untied, and by `attend`.

`nnx.Embed` holds (vocabulary, width) and `nnx.Linear` (width, vocabulary), so the two cannot be one array. A tie
through `jnp.transpose` puts a view in the place of the kernel. The layers, `nnx.grad` and `nnx.Optimizer` stay as they
are. `Embed.attend` is the way without a tie, for models whose author foresaw it: the numbers are the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sharedtree as st

VOCABULARY, WIDTH = 16, 8


class LanguageModel(nnx.Module):
    """Predicts each token from the one before it, with an output layer of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.head(x + nnx.gelu(self.hidden(x)))


class Attending(nnx.Module):
    """The same, written so that the embedding is the output layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.embed.attend(x + nnx.gelu(self.hidden(x)))


def tied_model() -> LanguageModel:
    model = LanguageModel(nnx.Rngs(0))
    return st.tie(model, lambda m: (m.embed.embedding, m.head.kernel), through=jnp.transpose)


def loss_fn(model: Any, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:-1]), text[1:]).mean()


@nnx.jit
def train_step(model: Any, optimizer: nnx.Optimizer[Any], text: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(loss_fn)(model, text)
    optimizer.update(model, gradient)
    return loss


def trained(model: Any, text: jax.Array, steps: int = 30) -> jax.Array:
    """Trains a model in place. Returns the last loss."""
    optimizer = nnx.Optimizer(model, optax.adamw(3e-2), wrt=nnx.Param)
    loss = loss_fn(model, text)
    for _ in range(steps):
        loss = train_step(model, optimizer, text)
    return loss


def main() -> None:
    text = jnp.array([1, 2, 3, 5, 8, 13] * 4)
    models = {"untied": LanguageModel(nnx.Rngs(0)), "tied": tied_model(), "attend": Attending(nnx.Rngs(0))}
    losses = {name: trained(model, text) for name, model in models.items()}
    for name, model in models.items():
        print(f"{name:7} {st.count_parameters(model)} parameters, loss {losses[name]:.4f}")

    tied = models["tied"]
    assert jnp.allclose(losses["tied"], losses["attend"], rtol=1e-4)
    assert st.count_parameters(tied) == st.count_parameters(models["attend"])
    assert tied.head.kernel.of[0] is tied.embed.embedding

    again = st.from_bytes(st.to_bytes(tied), trusted=["flax", LanguageModel])
    assert again.head.kernel.of[0] is again.embed.embedding
    print(*st.ties(again)[0].views)
    print("the embedding is still one array, which the output layer transposes")


if __name__ == "__main__":
    main()
