"""A train step on a language model whose embedding and output layer share one weight.

The weight is tied once, after construction. It is then one input of the compiled step, has one gradient (the sum over
both uses) and one pair of Adam moments, and the model that comes out of each step still has the tie.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st


class LanguageModel(eqx.Module):
    """Predicts each token from the one before it."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, key=keys[1])
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=keys[2])

    def __call__(self, token: jax.Array) -> jax.Array:
        hidden = self.embed(token)
        return self.head(hidden + self.mlp(hidden))


def loss_fn(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


tx = st.optimizer(optax.adam(1e-2))


@st.jit
def train_step(model, state, tokens):
    loss, gradient = st.value_and_grad(loss_fn)(model, tokens)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    model = LanguageModel(16, 8, key=jax.random.key(0))
    untied = st.count_parameters(model)
    model = st.tie(model, lambda m: (m.embed.weight, m.head.weight))
    print(f"parameters: {untied} untied, {st.count_parameters(model)} tied")
    for tie in st.ties(model):
        print(f"tie: {' = '.join(tie.paths)}, {tie.dtype}{list(tie.shape)}")

    state = tx.init(model)
    tokens = jnp.array([1, 2, 3, 5, 8, 13] * 4)
    first = last = None
    for _ in range(40):
        model, state, last = train_step(model, state, tokens)
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert model.embed.weight is model.head.weight
    assert state[0].mu.embed.weight is state[0].mu.head.weight
    assert last < first / 2
    print("one weight and one pair of moments, after 40 steps")


if __name__ == "__main__":
    main()
