"""A small GPT whose output layer is a module of its own and reads the transpose of the embedding's weight.

The two layers are made as in any model, each with a weight; nothing in their code knows of sharing. `st.tie` makes the
two weights one. From there on the compiled step has one input for it, its gradient is the sum over both uses, the
norm that is clipped and the weight decay count it once, and Adam keeps one pair of moments.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 11, 8, 16, 2, 2


class Block(eqx.Module):
    """Causal attention and an MLP, each on normalised input and added to the stream."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp_norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        normal = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normal, normal, normal, mask=jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class LMHead(eqx.Module):
    """Turns the stream into logits. Its weight has a row for each word, as an embedding's has, so it is transposed."""

    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.T


class GPT(eqx.Module):
    """Predicts each token from those before it."""

    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    lm_head: LMHead

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3 + DEPTH)
        self.embed = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)))
        self.positions = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH)))
        self.blocks = [Block(key=key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.lm_head = LMHead(0.1 * jax.random.normal(keys[2], (VOCABULARY, WIDTH)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + jax.vmap(self.positions)(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(jax.vmap(self.norm)(x))


def new_model(key: jax.Array) -> GPT:
    return st.tie(GPT(key=key), lambda m: (m.embed.weight, m.lm_head.weight))


@jax.jit
def new_batch(key: jax.Array) -> jax.Array:
    """Texts that count: each starts somewhere and goes on in steps of 1, 2 or 3."""
    keys = jax.random.split(key)
    start = jax.random.randint(keys[0], (16, 1), 0, VOCABULARY)
    stride = jax.random.randint(keys[1], (16, 1), 1, 4)
    return (start + stride * jnp.arange(LENGTH + 1)) % VOCABULARY


def loss_fn(model: GPT, texts: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


tx = st.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)))


@st.jit
def train_step(model, state, texts):
    loss, gradient = st.value_and_grad(loss_fn)(model, texts)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    model = new_model(jax.random.key(0))
    (tie,) = st.ties(model)
    print(f"{' = '.join(tie.paths)}, {tie.dtype}{list(tie.shape)}")

    state = tx.init(model)
    first = last = None
    for key in jax.random.split(jax.random.key(1), 60):
        model, state, last = train_step(model, state, new_batch(key))
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 2
    assert model.embed.weight is model.lm_head.weight
    moments = state[1][0].mu
    assert moments.embed.weight is moments.lm_head.weight
    print("one weight and one pair of moments, after 60 steps")


if __name__ == "__main__":
    main()
