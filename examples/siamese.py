"""A Siamese network: two arms that are one encoder, a contrastive loss, and a target that follows slowly.

Both arms are the same object, so its gradient is the sum over what the two of them saw. `st.copy` makes the target: a
second model with the same ties and arrays of its own. Its arms are one object, too, and stay so when `st.tree.map`
moves it a little towards the model after each step.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

FEATURES, CODE, CLASSES, MARGIN, DECAY = 6, 4, 3, 1.0, 0.9


class Siamese(eqx.Module):
    """Encodes the two members of a pair."""

    left: eqx.nn.MLP
    right: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        self.left = eqx.nn.MLP(FEATURES, CODE, 16, depth=1, activation=jnp.tanh, key=key)
        self.right = self.left

    def __call__(self, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return self.left(pair[0]), self.right(pair[1])


@jax.jit
def new_batch(key: jax.Array):
    """Pairs of noisy vectors, and whether both are of one class."""
    keys = jax.random.split(key)
    labels = jax.random.randint(keys[0], (2, 32), 0, CLASSES)
    centres = jnp.eye(CLASSES, FEATURES)[labels]
    left, right = centres + 0.3 * jax.random.normal(keys[1], centres.shape)
    return (left, right), labels[0] == labels[1]


def contrast(a: jax.Array, b: jax.Array, is_same: jax.Array) -> jax.Array:
    """Pulls together what is the same, and pushes apart what is not, up to a margin."""
    distance = jnp.sqrt(((a - b) ** 2).sum(axis=-1) + 1e-6)
    return jnp.where(is_same, distance**2, jnp.maximum(MARGIN - distance, 0) ** 2).mean()


def loss_fn(model: Siamese, target: Siamese, batch) -> jax.Array:
    pair, is_same = batch
    left, right = jax.vmap(model)(pair)
    target_left, target_right = jax.vmap(target)(pair)
    within = contrast(left, right, is_same)
    across = contrast(left, target_right, is_same) + contrast(target_left, right, is_same)
    return within + across / 2


tx = st.optimizer(optax.adam(3e-3))


@st.jit
def train_step(model, target, state, batch):
    # Only the first argument is differentiated. The target shares no object with it, so there is nothing to cut.
    loss, gradient = st.value_and_grad(loss_fn)(model, target, batch)
    updates, state = tx.update(gradient, state, model)
    model = st.apply_updates(model, updates)
    target = st.tree.map(lambda slow, fast: DECAY * slow + (1 - DECAY) * fast, target, model)
    return model, target, state, loss


def main() -> None:
    model = Siamese(key=jax.random.key(0))
    target = st.copy(model)
    assert target.left is target.right
    assert target.left is not model.left

    state = tx.init(model)
    first = last = None
    for key in jax.random.split(jax.random.key(1), 100):
        model, target, state, last = train_step(model, target, state, new_batch(key))
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 2
    assert model.left is model.right
    assert target.left is target.right
    assert state[0].mu.left is state[0].mu.right
    pair, is_same = new_batch(jax.random.key(2))
    left, right = jax.vmap(target)(pair)
    is_near = ((left - right) ** 2).sum(axis=-1) < (MARGIN / 2) ** 2
    print(f"the target tells pairs of one class from others in {jnp.mean(is_near == is_same):.0%} of cases")
    print("one encoder in the model and one in the target, after 100 steps")


if __name__ == "__main__":
    main()
