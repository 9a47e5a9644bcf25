"""One block used at every depth, as in the Universal Transformer and in ALBERT, unrolled and by `st.scan`.

The model has a list of blocks, as any transformer has, in which all entries are one block: what a port of existing code
looks like. The block's gradient is then the sum over its uses, and the optimizer has one slot for each of its weights.
A loop over the list and a scan that carries the block are the same model, and are trained by one step. The task is
ALBERT's: to fill in the masked tokens.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 8, 6, 16, 2, 3
MASK = VOCABULARY - 1


class Block(eqx.Module):
    """Attention and an MLP, both added to the stream, which is normalised afterwards."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x, x, x)
        return jax.vmap(self.norm)(x + jax.vmap(self.mlp)(x))


class LoopedTransformer(eqx.Module):
    """Guesses the masked tokens. Each depth adds a signal of its own, so that the block knows where it is."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    signals: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.signals = jax.random.normal(keys[2], (DEPTH, WIDTH))
        self.blocks = [Block(key=keys[3])] * DEPTH
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[4])

    def __call__(self, tokens: jax.Array, loop) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + self.positions
        return jax.vmap(self.head)(loop(self.blocks, self.signals, x))


def unrolled(blocks: list[Block], signals: jax.Array, x: jax.Array) -> jax.Array:
    """The blocks one after the other, as code for different blocks has it."""
    for block, signal in zip(blocks, signals, strict=True):
        x = block(x + signal)
    return x


def scanned(blocks: list[Block], signals: jax.Array, x: jax.Array) -> jax.Array:
    """The same, compiled once for all depths. The whole list is carried, and inside it is one block, too."""

    def body(carry, signal):
        blocks, x = carry
        assert all(block is blocks[0] for block in blocks)
        return (blocks, blocks[0](x + signal)), None

    (_, x), _ = st.scan(body, (blocks, x), signals)
    return x


@jax.jit
def new_batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Texts that say one word over and over, and the same with about every fourth token masked."""
    keys = jax.random.split(key)
    texts = jnp.broadcast_to(jax.random.randint(keys[0], (16, 1), 0, MASK), (16, LENGTH))
    return texts, jnp.where(jax.random.bernoulli(keys[1], 0.25, texts.shape), MASK, texts)


def loss_fn(model: LoopedTransformer, batch, loop) -> jax.Array:
    texts, masked = batch
    logits = jax.vmap(functools.partial(model, loop=loop))(masked)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, texts)
    return jnp.mean(losses, where=masked == MASK)


tx = st.optimizer(optax.adam(1e-2))


@st.jit(static_argnames="loop")
def train_step(model, state, batch, loop=unrolled):
    loss, gradient = st.value_and_grad(loss_fn)(model, batch, loop)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    start = LoopedTransformer(key=jax.random.key(0))
    one = st.count_parameters(start.blocks[0])
    by_path = sum(st.count_parameters(block) for block in start.blocks)
    print(f"parameters of the blocks: {by_path} by path, {one} in fact")

    for loop in (unrolled, scanned):
        model, state = start, tx.init(start)
        first = last = None
        for key in jax.random.split(jax.random.key(1), 60):
            model, state, last = train_step(model, state, new_batch(key), loop=loop)
            first = last if first is None else first
        print(f"{loop.__name__}: loss {first:.3f} at the first step, {last:.3f} at the last")
        assert last < first / 2
        assert all(block is model.blocks[0] for block in model.blocks)
        assert all(block is state[0].mu.blocks[0] for block in state[0].mu.blocks)
    print("one block and one pair of moments, after 60 steps of each")


if __name__ == "__main__":
    main()
