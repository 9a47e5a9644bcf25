"""The examples beside their twins: the same models in vanilla JAX, in which each shared parameter stands once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st

from .twins import STEPS, arrays, assert_each_once, assert_same_losses, example, keys, train_beside, trained
from .vanilla import attention, layer_norm, linear, log_losses, mlp

pytestmark = pytest.mark.slow


def loss_of_tied_gpt(p, texts):
    x = p["table"][texts[:, :-1]] + p["positions"]
    mask = jnp.tri(x.shape[1], dtype=bool)
    for block in p["blocks"]:
        normal = layer_norm(block["attention_norm"], x)
        x = x + attention(block["attention"], normal, normal, 2, mask)
        x = x + mlp(block["mlp"], layer_norm(block["mlp_norm"], x), jax.nn.gelu)
    return log_losses(layer_norm(p["norm"], x) @ p["table"].T, texts[:, 1:]).mean()


def test_tied_gpt():
    """The GPT with a tied weight beside one that has a single table."""
    gpt = example("tied_gpt")
    model = gpt.new_model(jax.random.key(0))
    params = {
        "table": model.embed.weight,
        "positions": model.positions.weight,
        "blocks": arrays(model.blocks),
        "norm": arrays(model.norm),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    model, state, _ = train_beside(gpt, model, loss_of_tied_gpt, params, tx)
    assert model.embed.weight is model.lm_head.weight
    assert state[1][0].nu.embed.weight is state[1][0].nu.lm_head.weight


def loss_of_encoder_decoder(p, batch):
    texts, written, backwards = batch
    encoder, decoder = p["encoder"], p["decoder"]
    x = p["table"][texts] + encoder["positions"]
    memory = layer_norm(encoder["norm"], x + attention(encoder["attention"], x, x, 2))
    x = p["table"][written] + decoder["positions"]
    x = x + attention(decoder["attention"], x, memory, 2)
    x = layer_norm(decoder["norm"], x + mlp(decoder["mlp"], x))
    return log_losses(x @ p["table"].T, backwards).mean()


def test_encoder_decoder():
    """The encoder-decoder with one embedding in three places beside one that has a single table."""
    program = example("encoder_decoder")
    model = program.new_model(jax.random.key(0))
    params = {"table": model.encoder.embed.weight, "encoder": arrays(model.encoder), "decoder": arrays(model.decoder)}
    del params["encoder"]["embed"], params["decoder"]["embed"]
    model, state, _ = train_beside(program, model, loss_of_encoder_decoder, params, optax.adam(1e-2))
    for tree in (model, state[0].mu):
        assert tree.encoder.embed is tree.decoder.embed
        assert tree.encoder.embed.weight is tree.head.weight


def loss_of_looped_transformer(p, batch):
    texts, masked = batch
    x = p["embed"][masked] + p["positions"]
    for signal in p["signals"]:
        x = x + signal
        x = x + attention(p["block"]["attention"], x, x, 2)
        x = layer_norm(p["block"]["norm"], x + mlp(p["block"]["mlp"], x))
    return jnp.mean(log_losses(linear(p["head"], x), texts), where=masked == 7)


def test_looped_transformer():
    """One block at every depth, unrolled and scanned, beside a function that is called several times."""
    looped = example("looped_transformer")
    start = looped.LoopedTransformer(key=jax.random.key(0))
    params = {
        "embed": start.embed.weight,
        "positions": start.positions,
        "signals": start.signals,
        "block": arrays(start.blocks[0]),
        "head": arrays(start.head),
    }
    steps = [functools.partial(looped.train_step, loop=loop) for loop in (looped.unrolled, looped.scanned)]
    for step in steps:
        model, state, _ = train_beside(
            looped, start, loss_of_looped_transformer, params, optax.adam(1e-2), train_step=step
        )
        assert model.blocks[0] is model.blocks[1] is model.blocks[2]
        assert state[0].nu.blocks[0] is state[0].nu.blocks[1] is state[0].nu.blocks[2]


def loss_of_actor_critic(p, batch):
    observations, actions, rewards = batch
    features = jnp.tanh(mlp(p["encoder"], observations, jnp.tanh))
    logits, values = linear(p["actor"], features), linear(p["critic"], features)[:, 0]
    advantages = jax.lax.stop_gradient(rewards - values)
    log_chances = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
    negentropy = (jnp.exp(log_chances) * log_chances).sum(axis=1)
    return jnp.mean(advantages * log_losses(logits, actions) + 0.5 * (rewards - values) ** 2 + 0.01 * negentropy)


def test_actor_critic():
    """The actor and the critic on one encoder beside two layers on what one encoder gives."""
    program = example("actor_critic")
    model = program.ActorCritic.new(jax.random.key(0))
    params = {
        "encoder": arrays(model.actor.encoder),
        "actor": arrays(model.actor.layer),
        "critic": arrays(model.critic.layer),
    }
    # Both learn from one record of what was played, for the actor throws dice.
    batches = [program.play(model, key) for key in keys()]
    rates = {"encoder": optax.adam(1e-2), "actor": optax.adam(2e-2), "critic": optax.sgd(0.1)}
    tx = optax.multi_transform(rates, {name: name for name in params})
    model, state, _ = train_beside(program, model, loss_of_actor_critic, params, tx, batches=batches)
    assert model.actor.encoder is model.critic.encoder
    moments = state.inner_states["encoder"].inner_state[0].nu
    assert moments.actor.encoder is moments.critic.encoder


def contrast(a, b, is_same):
    distance = jnp.sqrt(((a - b) ** 2).sum(axis=-1) + 1e-6)
    return jnp.where(is_same, distance**2, jnp.maximum(1 - distance, 0) ** 2).mean()


def loss_of_siamese(encoder, average, batch):
    (left, right), is_same = batch
    fast = [mlp(encoder, x, jnp.tanh) for x in (left, right)]
    slow = [mlp(average, x, jnp.tanh) for x in (left, right)]
    across = contrast(fast[0], slow[1], is_same) + contrast(slow[0], fast[1], is_same)
    return contrast(*fast, is_same) + across / 2


tx_of_siamese = optax.adam(3e-3)


@jax.jit
def step_of_siamese(encoder, average, state, batch):
    loss, gradient = jax.value_and_grad(loss_of_siamese)(encoder, average, batch)
    updates, state = tx_of_siamese.update(gradient, state)
    encoder = optax.apply_updates(encoder, updates)
    average = jax.tree.map(lambda slow, fast: 0.9 * slow + (1 - 0.9) * fast, average, encoder)
    return encoder, average, state, loss


def test_siamese():
    """The Siamese network and its target beside one encoder that is called twice, and one average of it."""
    siamese = example("siamese")
    model = siamese.Siamese(key=jax.random.key(0))
    target = st.copy(model)
    encoder = average = arrays(model.left)
    batches = [siamese.new_batch(key) for key in keys()]
    twin_state = tx_of_siamese.init(encoder)
    encoder, average, twin_state, expected = trained(step_of_siamese, encoder, average, twin_state, batches=batches)
    state = siamese.tx.init(model)
    model, target, state, losses = trained(siamese.train_step, model, target, state, batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, encoder, state, twin_state)
    assert_each_once(target, average)
    assert model.left is model.right
    assert target.left is target.right
    assert target.left is not model.left
    assert state[0].nu.left is state[0].nu.right


def made_of(generator, noise, codes):
    return mlp(generator, jnp.concatenate([noise, jnp.eye(3)[codes]], axis=1), jnp.tanh)


def judged(critics, points):
    features = jnp.tanh(mlp(critics["trunk"], points, jnp.tanh))
    return linear(critics["is_real"], features)[:, 0], linear(critics["code"], features)


def critics_loss(critics, generator, batch):
    real, noise, codes = batch
    of_real, _ = judged(critics, real)
    of_made, logits = judged(critics, made_of(generator, noise, codes))
    return jnp.logaddexp(0, -of_real).mean() + jnp.logaddexp(0, of_made).mean() + log_losses(logits, codes).mean()


def generator_loss(generator, critics, batch):
    _, noise, codes = batch
    of_made, logits = judged(critics, made_of(generator, noise, codes))
    return jnp.logaddexp(0, -of_made).mean() + log_losses(logits, codes).mean()


critics_tx, generator_tx = optax.adam(1e-2, b1=0.5), optax.adam(3e-3, b1=0.5)


@jax.jit
def step_of_gan(critics, generator, states, batch):
    of_critics, gradient = jax.value_and_grad(critics_loss)(critics, generator, batch)
    updates, critics_state = critics_tx.update(gradient, states[0])
    critics = optax.apply_updates(critics, updates)
    of_generator, gradient = jax.value_and_grad(generator_loss)(generator, critics, batch)
    updates, generator_state = generator_tx.update(gradient, states[1])
    generator = optax.apply_updates(generator, updates)
    return critics, generator, (critics_state, generator_state), jnp.stack([of_critics, of_generator])


def test_gan():
    """The GAN with a shared trunk beside one whose critics are two layers on what one trunk gives."""
    gan = example("gan")
    model = gan.InfoGAN.new(jax.random.key(0))
    generator = arrays(model.generator)
    critics = {
        "trunk": arrays(model.discriminator.trunk),
        "is_real": arrays(model.discriminator.head),
        "code": arrays(model.recogniser.head),
    }
    batches = [gan.new_batch(key) for key in keys()]
    twin_states = critics_tx.init(critics), generator_tx.init(generator)
    critics, generator, twin_states, expected = trained(step_of_gan, critics, generator, twin_states, batches=batches)
    model, states, losses = trained(gan.train_step, model, gan.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, (critics, generator))
    for state, twin_state in zip(states, twin_states, strict=True):
        assert_each_once(state, twin_state)
    assert model.discriminator.trunk is model.recogniser.trunk
    assert states[0][0].nu.discriminator.trunk is states[0][0].nu.recogniser.trunk


def loss_of_lora(table, layers):
    def loss(adapters, text):
        weights = [table, *(layer["weight"] for layer in layers)]
        adapted = [weight + lora["up"] @ lora["down"] for weight, lora in zip(weights, adapters, strict=True)]
        hidden = adapted[0][text[:-1]]
        both = [{**layer, "weight": weight} for layer, weight in zip(layers, adapted[1:], strict=True)]
        logits = (hidden + mlp({"layers": both}, hidden)) @ adapted[0].T
        return log_losses(logits, text[1:]).mean()

    return loss


def test_lora():
    """LoRA on a tied weight beside one table with one adapter."""
    program = example("lora")
    model = program.new_model(jax.random.key(0))
    adapters = program.new_adapters(model, jax.random.key(1))
    params, frozen = arrays(adapters), arrays(model.mlp.layers)
    text = jnp.array([1, 2, 3, 5, 8] * 5)
    batches = [(text + i) % 12 for i in range(STEPS)]
    loss = loss_of_lora(model.embed.weight, frozen)
    step = lambda adapters, state, text: program.train_step(adapters, state, model, text)
    adapters, _, params = train_beside(
        program, adapters, loss, params, optax.adam(3e-2), train_step=step, batches=batches
    )
    merged = program.merged(model, adapters)
    assert merged.embed.weight is merged.head.weight
    table = model.embed.weight + params[0]["up"] @ params[0]["down"]
    np.testing.assert_allclose(merged.head.weight, table, rtol=1e-3, atol=1e-4)


def followed(p, points, time):
    for _ in range(5):
        slope = mlp(p, points, jnp.tanh)
        points = points + time / 5 * (slope + mlp(p, points + time / 5 * slope, jnp.tanh)) / 2
    return points


def loss_of_neural_ode(p, batch):
    before, after = batch
    return jnp.mean((followed(p, before, 0.5) - after) ** 2) + jnp.mean((followed(p, after, -0.5) - before) ** 2)


def test_neural_ode():
    """Two flows along one field beside Heun's method written by hand, there and back with one set of parameters."""
    pytest.importorskip("diffrax")
    program = example("neural_ode")
    model = program.Clock(key=jax.random.key(0))
    params = arrays(model.future.field.mlp)
    model, state, _ = train_beside(program, model, loss_of_neural_ode, params, optax.adam(1e-2))
    assert model.future.field is model.past.field
    assert state[0].nu.future.field is state[0].nu.past.field
