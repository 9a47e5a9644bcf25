"""An encoder-decoder with one embedding in three places: for what is read, for what is written, and as output layer.

The encoder and the decoder hold one `Embedding`, and the output layer's weight is that embedding's: a layer in two
places and an array in three. Both kinds of tie are made in one go, after construction. It learns to write backwards
what it reads.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

VOCABULARY, LENGTH, WIDTH, HEADS = 7, 5, 16, 2
START = 0


class Encoder(eqx.Module):
    """Reads: attention over the whole text."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + self.positions
        return jax.vmap(self.norm)(x + self.attention(x, x, x))


class Decoder(eqx.Module):
    """Writes: each token from the one before it, and from what attention finds in what was read."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, key=keys[3])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, tokens: jax.Array, memory: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + self.positions
        x = x + self.attention(x, memory, memory)
        return jax.vmap(self.norm)(x + jax.vmap(self.mlp)(x))


class Translator(eqx.Module):
    """From a text and what is written of its translation to the logits of each next token."""

    encoder: Encoder
    decoder: Decoder
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.encoder = Encoder(key=keys[0])
        self.decoder = Decoder(key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, text: jax.Array, written: jax.Array) -> jax.Array:
        return jax.vmap(self.head)(self.decoder(written, self.encoder(text)))


def new_model(key: jax.Array) -> Translator:
    model = Translator(key=key)
    model = st.tie(model, lambda m: (m.encoder.embed, m.decoder.embed))
    return st.tie(model, lambda m: (m.encoder.embed.weight, m.head.weight))


@jax.jit
def new_batch(key: jax.Array):
    """Texts, and the same backwards: as they are to be written, and shifted by one, as they are given."""
    texts = jax.random.randint(key, (16, LENGTH), START + 1, VOCABULARY)
    backwards = texts[:, ::-1]
    return texts, jnp.pad(backwards[:, :-1], ((0, 0), (1, 0)), constant_values=START), backwards


def loss_fn(model: Translator, batch) -> jax.Array:
    texts, written, backwards = batch
    logits = jax.vmap(model)(texts, written)
    return optax.softmax_cross_entropy_with_integer_labels(logits, backwards).mean()


tx = st.optimizer(optax.adam(1e-2))


@st.jit
def train_step(model, state, batch):
    loss, gradient = st.value_and_grad(loss_fn)(model, batch)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    model = new_model(jax.random.key(0))
    for tie in st.ties(model):
        print(f"one {tie.kind}: {' = '.join(tie.paths)}")

    state = tx.init(model)
    first = last = None
    for key in jax.random.split(jax.random.key(1), 150):
        model, state, last = train_step(model, state, new_batch(key))
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 2
    assert model.encoder.embed is model.decoder.embed
    assert model.encoder.embed.weight is model.head.weight
    assert state[0].mu.decoder.embed.weight is state[0].mu.head.weight
    print("one embedding in three places, after 150 steps")


if __name__ == "__main__":
    main()
