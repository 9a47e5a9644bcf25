"""An actor and a critic on one encoder, with a learning rate for each of the three.

The actor chooses, the critic says how good the situation is, and both see it through the same encoder, which is one
object. One gradient of one loss holds what both ask of the encoder. `optax.multi_transform` is told by labels which
parameters have which learning rate. The labels are a prefix of the model, with the same for the encoder at both paths.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

SENSES, ACTIONS, WIDTH, BATCH = 4, 3, 16, 64


class Head(eqx.Module):
    """A layer on top of an encoder."""

    encoder: eqx.nn.MLP
    layer: eqx.nn.Linear

    def __call__(self, observation: jax.Array) -> jax.Array:
        return self.layer(jax.nn.tanh(self.encoder(observation)))


class ActorCritic(eqx.Module):
    """The logits of each action, and the reward that is to be expected."""

    actor: Head
    critic: Head

    @classmethod
    def new(cls, key: jax.Array) -> "ActorCritic":
        keys = jax.random.split(key, 3)
        encoder = eqx.nn.MLP(SENSES, WIDTH, WIDTH, depth=1, activation=jnp.tanh, key=keys[0])
        return cls(
            actor=Head(encoder, eqx.nn.Linear(WIDTH, ACTIONS, key=keys[1])),
            critic=Head(encoder, eqx.nn.Linear(WIDTH, "scalar", key=keys[2])),
        )


LABELS = ActorCritic(actor=Head("encoder", "actor"), critic=Head("encoder", "critic"))

tx = st.optimizer(
    optax.multi_transform({"encoder": optax.adam(1e-2), "actor": optax.adam(2e-2), "critic": optax.sgd(0.1)}, LABELS)
)


def rewards(observations: jax.Array, actions: jax.Array) -> jax.Array:
    """The world: the best action is to press the button that shines brightest, and it shows how bright it is."""
    brightness = observations[:, :ACTIONS]
    return jnp.take_along_axis(brightness, actions[:, None], axis=1)[:, 0]


@st.jit
def play(model: ActorCritic, key: jax.Array):
    """Observations, what the actor does about them, and the rewards."""
    keys = jax.random.split(key)
    observations = jax.random.normal(keys[0], (BATCH, SENSES))
    actions = jax.random.categorical(keys[1], jax.vmap(model.actor)(observations))
    return observations, actions, rewards(observations, actions)


def loss_fn(model: ActorCritic, batch) -> jax.Array:
    observations, actions, rewards = batch
    log_chances = jax.nn.log_softmax(jax.vmap(model.actor)(observations))
    values = jax.vmap(model.critic)(observations)
    advantages = jax.lax.stop_gradient(rewards - values)
    chosen = jnp.take_along_axis(log_chances, actions[:, None], axis=1)[:, 0]
    entropy = -(jnp.exp(log_chances) * log_chances).sum(axis=1)
    return jnp.mean(-advantages * chosen + 0.5 * (rewards - values) ** 2 - 0.01 * entropy)


@st.jit
def train_step(model, state, batch):
    loss, gradient = st.value_and_grad(loss_fn)(model, batch)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    model = ActorCritic.new(jax.random.key(0))
    (tie,) = st.ties(model)
    print(f"one {tie.kind}: {' = '.join(tie.paths)}")

    state = tx.init(model)
    earned = []
    for key in jax.random.split(jax.random.key(1), 150):
        batch = play(model, key)
        model, state, _ = train_step(model, state, batch)
        earned.append(batch[2].mean())
    print(f"reward: {earned[0]:.2f} at the first step, {earned[-1]:.2f} at the last; at best about 0.85")

    assert earned[-1] > 0.5
    assert model.actor.encoder is model.critic.encoder
    moments = state.inner_states["encoder"].inner_state[0].mu
    assert moments.actor.encoder is moments.critic.encoder
    print("one encoder and one pair of moments, after 150 steps")


if __name__ == "__main__":
    main()
