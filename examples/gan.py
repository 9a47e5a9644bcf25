"""A GAN whose two critics share a trunk, trained by two optimizers that take turns, as in InfoGAN.

The discriminator tells real points from made ones. The recogniser reads from a made point the code that it was made
for. Both sit on one trunk, which is one object under two names. The critics have one optimizer and the generator has
another: `st.tree.partition` parts the model between them, `st.tree.combine` joins it, and the trunk stays one in both.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

NOISE, CODES, BATCH = 2, 3, 32


class Critic(eqx.Module):
    """A judgement on a point, made from the features that the trunk finds."""

    trunk: eqx.nn.MLP
    head: eqx.nn.Linear

    def __call__(self, point: jax.Array) -> jax.Array:
        return self.head(jax.nn.tanh(self.trunk(point)))


class InfoGAN(eqx.Module):
    """Makes points for codes; judges whether a point is real; reads the code of a point."""

    generator: eqx.nn.MLP
    discriminator: Critic
    recogniser: Critic

    @classmethod
    def new(cls, key: jax.Array) -> "InfoGAN":
        keys = jax.random.split(key, 4)
        trunk = eqx.nn.MLP(2, 16, 16, depth=1, activation=jnp.tanh, key=keys[0])
        return cls(
            generator=eqx.nn.MLP(NOISE + CODES, 2, 16, depth=1, activation=jnp.tanh, key=keys[1]),
            discriminator=Critic(trunk, eqx.nn.Linear(16, "scalar", key=keys[2])),
            recogniser=Critic(trunk, eqx.nn.Linear(16, CODES, key=keys[3])),
        )

    def make(self, noise: jax.Array, codes: jax.Array) -> jax.Array:
        return jax.vmap(self.generator)(jnp.concatenate([noise, jax.nn.one_hot(codes, CODES)], axis=1))


# A prefix of the model: the trunk is named by two paths, and both say the same.
IS_CRITIC = InfoGAN(generator=False, discriminator=True, recogniser=True)


def read_codes(model: InfoGAN, made: jax.Array, codes: jax.Array) -> jax.Array:
    logits = jax.vmap(model.recogniser)(made)
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes).mean()


def critics_loss(critics: InfoGAN, generator: InfoGAN, batch) -> jax.Array:
    model = st.tree.combine(critics, generator)
    real, noise, codes = batch
    made = model.make(noise, codes)
    is_real = jax.nn.softplus(-jax.vmap(model.discriminator)(real)).mean()
    is_made = jax.nn.softplus(jax.vmap(model.discriminator)(made)).mean()
    return is_real + is_made + read_codes(model, made, codes)


def generator_loss(generator: InfoGAN, critics: InfoGAN, batch) -> jax.Array:
    model = st.tree.combine(critics, generator)
    _, noise, codes = batch
    made = model.make(noise, codes)
    return jax.nn.softplus(-jax.vmap(model.discriminator)(made)).mean() + read_codes(model, made, codes)


critics_tx = st.optimizer(optax.adam(1e-2, b1=0.5))
generator_tx = st.optimizer(optax.adam(3e-3, b1=0.5))


def init(model: InfoGAN):
    critics, generator = st.tree.partition(model, IS_CRITIC)
    return critics_tx.init(critics), generator_tx.init(generator)


@st.jit
def train_step(model, states, batch):
    critics, generator = st.tree.partition(model, IS_CRITIC)
    critics_state, generator_state = states

    of_critics, gradient = st.value_and_grad(critics_loss)(critics, generator, batch)
    updates, critics_state = critics_tx.update(gradient, critics_state, critics)
    critics = st.apply_updates(critics, updates)

    of_generator, gradient = st.value_and_grad(generator_loss)(generator, critics, batch)
    updates, generator_state = generator_tx.update(gradient, generator_state, generator)
    generator = st.apply_updates(generator, updates)

    losses = jnp.stack([of_critics, of_generator])
    return st.tree.combine(critics, generator), (critics_state, generator_state), losses


@jax.jit
def new_batch(key: jax.Array):
    """Real points, which are around the corners of a triangle; and noise and codes to make others of."""
    keys = jax.random.split(key, 4)
    corners = jnp.array([[0.0, 1.0], [0.9, -0.5], [-0.9, -0.5]])[jax.random.randint(keys[0], BATCH, 0, CODES)]
    real = corners + 0.1 * jax.random.normal(keys[1], (BATCH, 2))
    return real, jax.random.normal(keys[2], (BATCH, NOISE)), jax.random.randint(keys[3], BATCH, 0, CODES)


def main() -> None:
    model = InfoGAN.new(jax.random.key(0))
    (tie,) = st.ties(model)
    print(f"one {tie.kind}: {' = '.join(tie.paths)}")

    states = init(model)
    batches = [new_batch(key) for key in jax.random.split(jax.random.key(1), 150)]
    before = read_codes(model, model.make(*batches[0][1:]), batches[0][2])
    for batch in batches:
        model, states, _ = train_step(model, states, batch)
    after = read_codes(model, model.make(*batches[0][1:]), batches[0][2])
    print(f"loss of reading the code from what is made of it: {before:.3f} at first, {after:.3f} at last")

    assert after < before / 5
    assert model.discriminator.trunk is model.recogniser.trunk
    moments = states[0][0].mu
    assert moments.discriminator.trunk is moments.recogniser.trunk
    print("one trunk and one pair of moments, after 150 steps of each optimizer")


if __name__ == "__main__":
    main()
