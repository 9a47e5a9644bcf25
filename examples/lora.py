"""LoRA on a tied weight: a language model is adapted by small matrices, and its embedding and head stay one.

An adapter adds a product of two thin matrices to a frozen weight. The embedding's weight is the head's, too, so it has
one adapter, and `st.tree.at` puts the sum at both of its paths: `eqx.tree_at` would change the embedding and leave the
head as it was. Only the adapters are differentiated and have slots in the optimizer.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

VOCABULARY, WIDTH, RANK = 12, 16, 2


class LanguageModel(eqx.Module):
    """Predicts each token from the one before it."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(weight=0.3 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)))
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, token: jax.Array) -> jax.Array:
        hidden = self.embed(token)
        return self.head(hidden + self.mlp(hidden))


class LoRA(eqx.Module):
    """What is added to a weight: nothing at first."""

    down: jax.Array
    up: jax.Array

    def __init__(self, weight: jax.Array, *, key: jax.Array) -> None:
        rows, columns = weight.shape
        self.down = 0.3 * jax.random.normal(key, (RANK, columns))
        self.up = jnp.zeros((rows, RANK))

    def __call__(self, weight: jax.Array) -> jax.Array:
        return weight + self.up @ self.down


def new_model(key: jax.Array) -> LanguageModel:
    return st.tie(LanguageModel(key=key), lambda m: (m.embed.weight, m.head.weight))


def adapted_weights(model: LanguageModel) -> list[jax.Array]:
    """The weights that have adapters. A tied one is named once, by whichever of its paths."""
    return [model.embed.weight, *(layer.weight for layer in model.mlp.layers)]


def new_adapters(model: LanguageModel, key: jax.Array) -> list[LoRA]:
    weights = adapted_weights(model)
    return [LoRA(weight, key=key) for weight, key in zip(weights, jax.random.split(key, len(weights)), strict=True)]


def merged(model: LanguageModel, adapters: list[LoRA]) -> LanguageModel:
    """The model with the adapters worked into its weights, ties kept: what is used, and what can be shipped."""
    weights = adapted_weights(model)
    return st.tree.at(adapted_weights, model, [lora(w) for lora, w in zip(adapters, weights, strict=True)])


def loss_fn(adapters: list[LoRA], model: LanguageModel, text: jax.Array) -> jax.Array:
    logits = jax.vmap(merged(model, adapters))(text[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


tx = st.optimizer(optax.adam(3e-2))


@st.jit
def train_step(adapters, state, model, text):
    loss, gradient = st.value_and_grad(loss_fn)(adapters, model, text)
    updates, state = tx.update(gradient, state, adapters)
    return st.apply_updates(adapters, updates), state, loss


def main() -> None:
    model = new_model(jax.random.key(0))
    adapters = new_adapters(model, jax.random.key(1))
    print(f"parameters: {st.count_parameters(model)} frozen, {st.count_parameters(adapters)} trained")

    text = jnp.array([1, 2, 3, 5, 8] * 5)
    state = tx.init(adapters)
    first = last = None
    for _ in range(60):
        adapters, state, last = train_step(adapters, state, model, text)
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 2
    result = merged(model, adapters)
    assert result.embed.weight is result.head.weight
    assert result.embed.weight is not model.embed.weight
    assert st.same_sharing(result, model)
    print("the adapted weight is still one array, in the embedding and in the head")


if __name__ == "__main__":
    main()
