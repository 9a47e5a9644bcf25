"""Three public programs in Linen with `sharedtree.linen.TrainState`: CleanRL's DQN and TD3, and a small GPT.

Each is run as it is written, with one import changed and nothing tied, beside Flax's `TrainState`: the numbers are the
same. Where it shares a weight, it is run beside a twin that has the weight once, under Flax's.
"""

from typing import Any

import flax
import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
import sharedtree.linen

POLICY = st.Policy(containers=True)
BASES = {"Flax": flax.training.train_state.TrainState, "sharedtree": sharedtree.linen.TrainState}


def assert_close(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def params_of(network, *inputs):
    """Parameters with any numbers, of the shapes that the network makes: much quicker than its own."""
    numbers = np.random.default_rng(0)
    shapes = jax.eval_shape(network.init, jax.random.key(0), *inputs)["params"]
    return jax.tree.map(lambda leaf: jnp.asarray(numbers.normal(size=leaf.shape, scale=0.3), leaf.dtype), shapes)


# --- CleanRL, `dqn_jax.py` --------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    action_dim: int

    @nn.compact
    def __call__(self, x: jnp.ndarray):
        x = nn.Dense(8)(x)
        x = nn.relu(x)
        x = nn.Dense(8, name="hidden")(x)
        x = nn.relu(x)
        x = nn.Dense(8, name="again")(x)
        x = nn.relu(x)
        return nn.Dense(self.action_dim)(x)


class SharingQNetwork(nn.Module):
    """The same with one layer used twice, as Linen shares one."""

    action_dim: int

    @nn.compact
    def __call__(self, x: jnp.ndarray):
        hidden = nn.Dense(8, name="hidden")
        x = nn.relu(nn.Dense(8)(x))
        x = nn.relu(hidden(nn.relu(hidden(x))))
        return nn.Dense(self.action_dim)(x)


def batches(num, size=4, dim=3):
    numbers = np.random.default_rng(5)
    for _ in range(num):
        observations, next_observations = numbers.normal(size=(2, size, dim)).astype(np.float32)
        yield (
            observations,
            numbers.integers(2, size=(size, 1)),
            next_observations,
            np.float32(numbers.normal(size=size)),
        )


def dqn(base, network, params, jit, value_and_grad, copied):
    """The loop of the program, with a hard update of the target every second step."""

    class TrainState(base):
        target_params: Any

    q_state = TrainState.create(
        apply_fn=network.apply, params=params, target_params=copied(params), tx=optax.adam(learning_rate=2.5e-2)
    )

    @jit
    def update(q_state, observations, actions, next_observations, rewards):
        q_next_target = network.apply({"params": q_state.target_params}, next_observations)
        q_next_target = jnp.max(q_next_target, axis=-1)
        next_q_value = rewards + 0.99 * q_next_target

        def mse_loss(params):
            q_pred = network.apply({"params": params}, observations)
            q_pred = q_pred[jnp.arange(q_pred.shape[0]), actions.squeeze()]
            return ((q_pred - next_q_value) ** 2).mean(), q_pred

        (loss_value, q_pred), grads = value_and_grad(mse_loss, has_aux=True)(q_state.params)
        q_state = q_state.apply_gradients(grads=grads)
        return loss_value, q_pred, q_state

    losses = []
    for step, batch in enumerate(batches(4)):
        loss, old_val, q_state = update(q_state, *batch)
        losses.append(float(loss))
        if step % 2:
            q_state = q_state.replace(target_params=copied(q_state.params))
    return losses, q_state


def by_incremental_update(params):
    """What the program writes, with a step size of 1: new arrays, and no ties."""
    return optax.incremental_update(params, jax.tree.map(jnp.zeros_like, params), 1.0)


def test_dqn_of_cleanrl():
    network = QNetwork(2)
    params = params_of(network, jnp.ones((1, 3)))
    runs = [dqn(base, network, params, jax.jit, jax.value_and_grad, by_incremental_update) for base in BASES.values()]
    assert runs[0][0] == runs[1][0]
    assert_close(runs[0][1].params, runs[1][1].params)


@pytest.mark.slow
def test_dqn_with_a_tied_layer():
    """`again` is tied to `hidden`, beside a network that has one layer for both."""
    params = params_of(QNetwork(2), jnp.ones((1, 3)))
    tied = {**params, "again": params["hidden"]}
    once = {key: value for key, value in params.items() if key != "again"}
    value_and_grad = lambda f, **options: st.value_and_grad(f, policy=POLICY, **options)
    losses, state = dqn(BASES["sharedtree"], QNetwork(2), tied, st.jit, value_and_grad, st.copy)
    network = SharingQNetwork(2)
    want_losses, want = dqn(BASES["Flax"], network, once, jax.jit, jax.value_and_grad, by_incremental_update)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for params, wanted in ((state.params, want.params), (state.target_params, want.target_params)):
        assert all(params["again"][name] is params["hidden"][name] for name in ("kernel", "bias"))
        assert_close({key: value for key, value in params.items() if key != "again"}, wanted)
    slots, want_slots = state.opt_state[0], want.opt_state[0]
    assert slots.mu["again"]["kernel"] is slots.mu["hidden"]["kernel"]
    assert_close(slots.nu["hidden"], want_slots.nu["hidden"])


# --- CleanRL, `td3_continuous_action_jax.py` --------------------------------------------------------------------------


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: jnp.ndarray, a: jnp.ndarray):
        x = jnp.concatenate([x, a], -1)
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(1)(x)


class Actor(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        return nn.tanh(nn.Dense(2)(x))


def td3(base, jit, value_and_grad, share):
    """The two updates of the program. `share` is given the parameters of both critics, and may tie them."""

    class TrainState(base):
        target_params: Any

    actor, qf = Actor(), Critic()
    x, a = jnp.ones((1, 3)), jnp.ones((1, 2))
    actor_params, one = params_of(actor, x), params_of(qf, x, a)
    both = share({"qf1": one, "qf2": jax.tree.map(lambda leaf: leaf + 0.1, one)})
    make = lambda apply, params: TrainState.create(
        apply_fn=apply, params=params, target_params=st.copy(params), tx=optax.adam(learning_rate=3e-2)
    )
    actor_state, qf_state = make(actor.apply, actor_params), make(qf.apply, both)
    incremental = lambda new, old: st.tree.map(lambda n, o: 0.1 * n + 0.9 * o, new, old)

    @jit
    def update_critic(actor_state, qf_state, observations, actions, next_observations, rewards, key):
        noise = jnp.clip(jax.random.normal(key, actions.shape) * 0.2, -0.5, 0.5)
        next_actions = actor.apply({"params": actor_state.target_params}, next_observations)
        next_actions = jnp.clip(next_actions + noise, -1, 1)
        q = lambda params, *of: qf.apply({"params": params}, *of).reshape(-1)
        targets = [q(qf_state.target_params[name], next_observations, next_actions) for name in ("qf1", "qf2")]
        next_q_value = (rewards + 0.99 * jnp.minimum(*targets)).reshape(-1)

        def mse_loss(params):
            values = [q(params[name], observations, actions) for name in ("qf1", "qf2")]
            return sum(((value - next_q_value) ** 2).mean() for value in values)

        loss, grads = value_and_grad(mse_loss)(qf_state.params)
        return qf_state.apply_gradients(grads=grads), loss

    @jit
    def update_actor(actor_state, qf_state, observations):
        def actor_loss(params):
            actions = actor.apply({"params": params}, observations)
            return -qf.apply({"params": qf_state.params["qf1"]}, observations, actions).mean()

        loss, grads = value_and_grad(actor_loss)(actor_state.params)
        actor_state = actor_state.apply_gradients(grads=grads)
        actor_state = actor_state.replace(target_params=incremental(actor_state.params, actor_state.target_params))
        qf_state = qf_state.replace(target_params=incremental(qf_state.params, qf_state.target_params))
        return actor_state, qf_state, loss

    losses = []
    for step, (observations, _, next_observations, rewards) in enumerate(batches(4)):
        actions = np.tanh(observations[:, :2])
        key = jax.random.key(step)
        qf_state, loss = update_critic(actor_state, qf_state, observations, actions, next_observations, rewards, key)
        losses.append(float(loss))
        if step % 2:
            actor_state, qf_state, loss = update_actor(actor_state, qf_state, observations)
            losses.append(float(loss))
    return losses, actor_state, qf_state


@pytest.mark.slow
def test_td3_of_cleanrl():
    apart = lambda both: both
    runs = [td3(base, jax.jit, jax.value_and_grad, apart) for base in BASES.values()]
    assert runs[0][0] == runs[1][0]
    for one, other in zip(runs[0][1:], runs[1][1:], strict=True):
        assert_close((one.params, one.target_params), (other.params, other.target_params))
        assert_close(one.opt_state, other.opt_state)


@pytest.mark.slow
def test_td3_with_critics_that_share_their_first_layer():
    """Beside a step that is written by hand, which adds up the two gradients of the shared layer."""

    def share(both):
        return {"qf1": both["qf1"], "qf2": {**both["qf2"], "Dense_0": both["qf1"]["Dense_0"]}}

    def summed(f):
        """`jax.value_and_grad` of the twin: the shared layer has the sum of its two gradients, at both places."""

        def call(params):
            loss, grads = jax.value_and_grad(f)(params)
            if "qf1" not in grads:
                return loss, grads
            total = jax.tree.map(jnp.add, grads["qf1"]["Dense_0"], grads["qf2"]["Dense_0"])
            return loss, {name: {**grads[name], "Dense_0": total} for name in grads}

        return call

    value_and_grad = lambda f: st.value_and_grad(f, policy=POLICY)
    losses, _, state = td3(BASES["sharedtree"], st.jit, value_and_grad, share)
    want_losses, _, want = td3(BASES["Flax"], jax.jit, summed, share)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    assert_close((state.params, state.target_params), (want.params, want.target_params))
    for params in (state.params, state.target_params, state.opt_state[0].mu):
        assert params["qf1"]["Dense_0"]["kernel"] is params["qf2"]["Dense_0"]["kernel"]


# --- a small GPT ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        query, key, value = jnp.split(nn.Dense(24, name="attention")(nn.LayerNorm()(x)), 3, axis=-1)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, query @ key.mT / jnp.sqrt(8.0), -1e9))
        x = x + nn.Dense(8, name="out")(weights @ value)
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x)))


class GPT(nn.Module):
    """With an output layer of its own, `head`, whose weight has the shape of the embedding."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name="embed")(tokens)
        x = Block(name="block")(x)
        head = self.param("head", nn.initializers.normal(), (11, 8))
        return x @ head.T


class AttendingGPT(nn.Module):
    """With the embedding for an output layer: Linen's own way, in which there is one weight."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8, name="embed")
        return embed.attend(Block(name="block")(embed(tokens)))


TOKENS = jnp.array([[1, 5, 2, 7, 3], [4, 4, 9, 0, 10]])


def gpt(base, model, params, jit, value_and_grad):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 4)
    decays = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.1, mask=decays))
    state = base.create(apply_fn=model.apply, params=params, tx=tx)

    @jit
    def train_step(state, tokens):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for shift in range(3):
        state, loss = train_step(state, (TOKENS + shift) % 11)
        losses.append(float(loss))
    return losses, state


@pytest.mark.slow
def test_a_gpt_with_a_tied_embedding():
    once = params_of(AttendingGPT(), TOKENS)
    want_losses, want = gpt(BASES["Flax"], AttendingGPT(), once, jax.jit, jax.value_and_grad)
    tied = st.copy({**once, "head": once["embed"]["embedding"]})
    value_and_grad = lambda f: st.value_and_grad(f, policy=POLICY)
    losses, state = gpt(BASES["sharedtree"], GPT(), tied, lambda f: st.jit(f, donate_argnums=0), value_and_grad)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)  # the norm of the gradient counts the weight once
    assert state.params["head"] is state.params["embed"]["embedding"]
    assert_close({key: value for key, value in state.params.items() if key != "head"}, want.params)
    assert tied["head"].is_deleted()


@pytest.mark.slow
def test_a_gpt_whose_embedding_attends_needs_no_ties():
    """Linen's own way has one weight, so nothing but the import changes."""
    once = params_of(AttendingGPT(), TOKENS)
    jaxprs = []

    def traced(step):
        return lambda state, tokens: jaxprs.append(str(jax.make_jaxpr(step)(state, tokens))) or (state, 0.0)

    for base in BASES.values():
        gpt(base, AttendingGPT(), once, traced, jax.value_and_grad)
    assert jaxprs[:3] == jaxprs[3:]
