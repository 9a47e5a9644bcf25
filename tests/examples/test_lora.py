"""LoRA on a tied weight beside one table with one adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from .twins import STEPS, arrays, assert_each_once, assert_same_losses, example, step_of, trained
from .vanilla import log_losses, mlp


def twin_loss_of(table, layers):
    def twin_loss(adapters, text):
        weights = [table, *(layer["weight"] for layer in layers)]
        adapted = [weight + lora["up"] @ lora["down"] for weight, lora in zip(weights, adapters, strict=True)]
        hidden = adapted[0][text[:-1]]
        both = [{**layer, "weight": weight} for layer, weight in zip(layers, adapted[1:], strict=True)]
        logits = (hidden + mlp({"layers": both}, hidden)) @ adapted[0].T
        return log_losses(logits, text[1:]).mean()

    return twin_loss


@pytest.mark.slow
def test_same_losses_as_with_one_table():
    program = example("lora")
    model = program.new_model(jax.random.key(0))
    adapters = program.new_adapters(model, jax.random.key(1))
    params, frozen = arrays(adapters), arrays(model.mlp.layers)
    text = jnp.array([1, 2, 3, 5, 8] * 5)
    batches = [(text + i) % 12 for i in range(STEPS)]
    tx = optax.adam(3e-2)
    twin_loss = twin_loss_of(model.embed.weight, frozen)
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)

    def step(adapters, state, text):
        return program.train_step(adapters, state, model, text)

    adapters, state, losses = trained(step, adapters, program.tx.init(adapters), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(adapters, params, state, twin_state)
    merged = program.merged(model, adapters)
    assert merged.embed.weight is merged.head.weight
    table = model.embed.weight + params[0]["up"] @ params[0]["down"]
    np.testing.assert_allclose(merged.head.weight, table, rtol=1e-3, atol=1e-4)
