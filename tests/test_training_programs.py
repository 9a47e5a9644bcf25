"""What every training program has a line of, in whole programs, each beside the same by hand in JAX and optax.

Each model is small, and each twin has every shared parameter once: in dicts, `jax.grad` and optax as they are.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st


def is_close(one, two, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(two, np.float32), rtol=rtol, atol=1e-6)


def same_steps(ours, theirs, rtol=1e-5):
    for one, two in zip(ours, theirs, strict=True):
        is_close(one, two, rtol)


# A language model in bf16 with a master in fp32, an average, and a checkpoint -----------------------------------------


class GPT(eqx.Module):
    embed: eqx.nn.Embedding
    mix: jax.Array
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(8, 4, key=keys[0])
        self.mix = 0.3 * jax.random.normal(keys[1], (4, 4))
        self.head = eqx.nn.Linear(4, 8, use_bias=False, key=keys[2])

    def __call__(self, tokens):
        hidden = jax.vmap(self.embed)(tokens)
        return jax.vmap(self.head)(hidden + jnp.tanh(hidden @ self.mix))


def logits_by_hand(params, tokens):
    hidden = params["table"][tokens]
    return (hidden + jnp.tanh(hidden @ params["mix"])) @ params["table"].T


def cross_entropy(logits, tokens):
    labels = tokens[1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


TOKENS = jnp.array([1, 2, 3, 5, 7, 2, 1, 0, 4])
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


@pytest.mark.slow
def test_gpt_in_half_precision_with_a_master_an_average_and_a_checkpoint(tmp_path):
    model = st.tie(GPT(jax.random.key(0)), lambda m: (m.embed.weight, m.head.weight))
    params = {"table": model.embed.weight, "mix": model.mix}
    tx = st.optimizer(CLIPPED)

    @st.jit
    def step(model, average, state, tokens):
        loss_of = lambda master: cross_entropy(st.tree.cast(master, jnp.bfloat16)(tokens[:-1]), tokens)
        loss, gradient = st.value_and_grad(loss_of)(model)
        updates, state = tx.update(gradient, state, model)
        model = st.apply_updates(model, updates)
        return model, st.incremental_update(model, average, 0.1), state, (loss, st.tree.norm(gradient))

    @jax.jit
    def by_hand(params, average, state, tokens):
        half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        loss_of = lambda master: cross_entropy(logits_by_hand(half(master), tokens[:-1]), tokens)
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = CLIPPED.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.1), state, (loss, optax.tree.norm(gradient))

    ours = model, st.copy(model), tx.init(model)
    theirs = params, params, CLIPPED.init(params)
    for i in range(4):
        if i == 2:  # as after a restart
            st.save(tmp_path / "checkpoint.safetensors", ours)
            ours = st.load(tmp_path / "checkpoint.safetensors", like=ours)
        *ours, logged = step(*ours, TOKENS)
        *theirs, expected = by_hand(*theirs, TOKENS)
        same_steps(logged, expected, rtol=2e-2)
        ours, theirs = tuple(ours), tuple(theirs)
    for model, params in zip(ours[:2], theirs[:2], strict=True):
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.dtype == jnp.float32
        is_close(model.embed.weight, params["table"], rtol=5e-2)
        is_close(model.mix, params["mix"], rtol=5e-2)


# LoRA on a tied embedding ---------------------------------------------------------------------------------------------


class Adapted(eqx.Module):
    """A frozen table, and two thin matrices that are added to it, in the embedding and in the head."""

    table: jax.Array
    down: jax.Array
    up: jax.Array

    @property
    def weight(self):
        return self.table + self.up @ self.down


class AdaptedGPT(eqx.Module):
    embed: Adapted
    head: Adapted
    mix: jax.Array

    def __call__(self, tokens):
        hidden = self.embed.weight[tokens]
        return (hidden + jnp.tanh(hidden @ self.mix)) @ self.head.weight.T


def test_lora_on_a_tied_embedding():
    base = GPT(jax.random.key(0))
    adapted = Adapted(base.embed.weight, 0.3 * jax.random.normal(jax.random.key(1), (2, 4)), jnp.zeros((8, 2)))
    model = AdaptedGPT(adapted, adapted, base.mix)
    loras = {"down": adapted.down, "up": adapted.up}
    adapters = lambda path, value: path[-1] in ("down", "up")
    tx, vanilla = st.optimizer(optax.adamw(3e-2), wrt=adapters), optax.adamw(3e-2)

    @st.jit
    def step(model, state, tokens):
        loss_of = lambda model: cross_entropy(model(tokens[:-1]), tokens)
        loss, gradient = st.value_and_grad(loss_of, wrt=adapters)(model)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state, (loss, st.tree.norm(gradient))

    @jax.jit
    def by_hand(loras, state, tokens):
        def loss_of(loras):
            params = {"table": base.embed.weight + loras["up"] @ loras["down"], "mix": base.mix}
            return cross_entropy(logits_by_hand(params, tokens[:-1]), tokens)

        loss, gradient = jax.value_and_grad(loss_of)(loras)
        updates, state = vanilla.update(gradient, state, loras)
        return optax.apply_updates(loras, updates), state, (loss, optax.tree.norm(gradient))

    state, twin_state = tx.init(model), vanilla.init(loras)
    assert len(st.tree.leaves(state[0].mu)) == 2
    for _ in range(3):
        model, state, logged = step(model, state, TOKENS)
        loras, twin_state, expected = by_hand(loras, twin_state, TOKENS)
        same_steps(logged, expected)
    trained, frozen = st.tree.partition(model, adapters)
    assert model.embed is model.head
    assert trained.embed is trained.head
    same_steps([trained.head.down, trained.head.up], [loras["down"], loras["up"]], rtol=1e-4)
    np.testing.assert_array_equal(frozen.embed.table, base.embed.weight)


# DQN with a target network --------------------------------------------------------------------------------------------


class Duel(eqx.Module):
    """The value and the advantages, on one trunk."""

    value: tuple
    advantage: tuple

    def __call__(self, x):
        (trunk, value), (again, advantage) = self.value, self.advantage
        gains = advantage(jnp.tanh(again(x)))
        return value(jnp.tanh(trunk(x))) + gains - gains.mean()


def q_by_hand(params, x):
    dense = lambda layer, x: x @ layer[0].T + layer[1]
    hidden = jnp.tanh(dense(params["trunk"], x))
    gains = dense(params["advantage"], hidden)
    return dense(params["value"], hidden) + gains - gains.mean(axis=-1, keepdims=True)


@pytest.mark.slow
def test_dqn_with_a_target_that_follows():
    keys = jax.random.split(jax.random.key(0), 6)
    trunk, value, advantage = (
        eqx.nn.Linear(i, o, key=k) for i, o, k in ((3, 4, keys[0]), (4, 1, keys[1]), (4, 2, keys[2]))
    )
    model = Duel((trunk, value), (trunk, advantage))
    params = {name: (x.weight, x.bias) for name, x in {"trunk": trunk, "value": value, "advantage": advantage}.items()}
    seen, after = jax.random.normal(keys[3], (2, 8, 3))
    actions, rewards = jax.random.randint(keys[4], (8,), 0, 2), jax.random.normal(keys[5], (8,))
    tx, vanilla = st.optimizer(optax.adam(1e-2)), optax.adam(1e-2)

    def td_loss(q, next_q):
        goal = jax.lax.stop_gradient(rewards + 0.9 * next_q.max(axis=1))
        return ((q[jnp.arange(8), actions] - goal) ** 2).mean()

    @st.jit(donate_argnums=(0, 1, 2))
    def step(model, target, state):
        loss_of = lambda model, target: td_loss(jax.vmap(model)(seen), jax.vmap(target)(after))
        loss, gradient = st.value_and_grad(loss_of)(model, target)
        updates, state = tx.update(gradient, state, model)
        model = st.apply_updates(model, updates)
        return model, st.incremental_update(model, target, 0.05), state, (loss, st.tree.norm(gradient))

    @jax.jit
    def by_hand(params, target, state):
        loss_of = lambda params: td_loss(q_by_hand(params, seen), q_by_hand(target, after))
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = vanilla.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target, 0.05), state, (loss, optax.tree.norm(gradient))

    theirs = params, params, vanilla.init(params)
    theirs = jax.tree.map(lambda x: jnp.array(x, copy=True), theirs)
    ours = model, st.copy(model), tx.init(model)
    for _ in range(4):
        *ours, logged = step(*ours)
        *theirs, expected = by_hand(*theirs)
        same_steps(logged, expected)
    for model, params in zip(ours[:2], theirs[:2], strict=True):
        assert model.value[0] is model.advantage[0]
        is_close(model.value[0].weight, params["trunk"][0], rtol=1e-4)
        is_close(model.advantage[1].weight, params["advantage"][0], rtol=1e-4)


# A convolutional network of NNX with statistics and dropout -----------------------------------------------------------


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jax.nn.relu(self.norm(self.conv(x))).mean(axis=(1, 2))))


@pytest.mark.slow
def test_cnn_of_nnx_with_statistics_and_dropout():
    """Beside NNX's own transforms and optimizer, step for step, with the same dice."""
    images = jax.random.normal(jax.random.key(0), (4, 6, 6, 1))
    labels = jnp.array([0, 1, 2, 1])
    loss_of = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
    ours, theirs = CNN(nnx.Rngs(0)), CNN(nnx.Rngs(0))
    average = st.copy(ours)
    tx = st.optimizer(optax.adamw(1e-2), wrt=nnx.Param)
    optimizer = nnx.Optimizer(theirs, optax.adamw(1e-2), wrt=nnx.Param)

    @st.jit(in_place=True)
    def step(model, average, state):
        loss, gradient = st.value_and_grad(loss_of, wrt=nnx.Param, in_place=True)(model)
        updates, state = tx.update(gradient, state, model)
        model = st.apply_updates(model, updates)
        return model, st.incremental_update(model, average, 0.1), state, (loss, st.tree.norm(gradient))

    @nnx.jit
    def by_hand(model, optimizer):
        loss, gradient = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradient)
        return loss, optax.tree.norm(jax.tree.leaves(gradient))

    state = tx.init(ours)
    twin_average = jax.tree.leaves(nnx.state(theirs, nnx.Param, nnx.BatchStat))
    floating = lambda model: jax.tree.leaves(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    twin_average = floating(theirs)
    for _ in range(3):
        ours, average, state, logged = step(ours, average, state)
        same_steps(logged, by_hand(theirs, optimizer), rtol=1e-4)
        twin_average = optax.incremental_update(floating(theirs), twin_average, 0.1)
    same_steps(floating(ours), floating(theirs), rtol=1e-3)
    same_steps(floating(average), twin_average, rtol=1e-3)
    assert type(average.norm.mean) is nnx.BatchStat
    count = lambda model: int(model.dropout.rngs.count[...])
    assert count(ours) == count(theirs) == count(average) == 3
    half = st.tree.cast(ours, jnp.bfloat16)
    assert (half.conv.kernel[...].dtype, count(half)) == (jnp.bfloat16, 3)


# SimCLR ---------------------------------------------------------------------------------------------------------------


class SimCLR(eqx.Module):
    """Two views through one encoder, with a projector for each step of the loss."""

    left: eqx.nn.MLP
    right: eqx.nn.MLP
    temperature: jax.Array

    def __call__(self, one, two):
        points = jnp.concatenate([jax.vmap(self.left)(one), jax.vmap(self.right)(two)])
        return contrast(points, self.temperature)


def contrast(points, temperature):
    points = points / jnp.sqrt((points**2).sum(axis=1, keepdims=True) + 1e-6)
    count = len(points)
    likeness = points @ points.T / temperature - 1e9 * jnp.eye(count)
    return optax.softmax_cross_entropy_with_integer_labels(likeness, (jnp.arange(count) + count // 2) % count).mean()


def test_simclr():
    keys = jax.random.split(jax.random.key(0), 3)
    encoder = eqx.nn.MLP(3, 2, 4, depth=1, activation=jnp.tanh, key=keys[0])
    model = SimCLR(encoder, encoder, jnp.array(0.5))
    params = [(layer.weight, layer.bias) for layer in encoder.layers]
    one = jax.random.normal(keys[1], (5, 3))
    two = one + 0.1 * jax.random.normal(keys[2], (5, 3))
    fixed = SimCLR(True, True, False)  # a tree of booleans: the temperature is not trained
    chain = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9))
    tx = st.optimizer(chain, wrt=fixed)

    @st.jit
    def step(model, state):
        loss, gradient = st.value_and_grad(lambda model: model(one, two), wrt=fixed)(model)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state, (loss, st.tree.norm(gradient))

    def loss_by_hand(params):
        (w, b), (v, c) = params
        encode = lambda x: jnp.tanh(x @ w.T + b) @ v.T + c
        return contrast(jnp.concatenate([encode(one), encode(two)]), 0.5)

    @jax.jit
    def by_hand(params, state):
        loss, gradient = jax.value_and_grad(loss_by_hand)(params)
        updates, state = chain.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.tree.norm(gradient))

    state, twin_state = tx.init(model), chain.init(params)
    for _ in range(4):
        model, state, logged = step(model, state)
        params, twin_state, expected = by_hand(params, twin_state)
        same_steps(logged, expected, rtol=1e-4)
    assert model.left is model.right
    assert float(model.temperature) == 0.5
    for layer, (weight, bias) in zip(model.left.layers, params, strict=True):
        is_close(layer.weight, weight, rtol=1e-3)
        is_close(layer.bias, bias, rtol=1e-3)
