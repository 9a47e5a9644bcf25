"""The GPT with a tied weight beside one that has a single table."""

import jax
import jax.numpy as jnp
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, step_of, trained
from .vanilla import attention, layer_norm, log_losses, mlp


def twin_loss(p, texts):
    x = p["table"][texts[:, :-1]] + p["positions"]
    mask = jnp.tri(x.shape[1], dtype=bool)
    for block in p["blocks"]:
        normal = layer_norm(block["attention_norm"], x)
        x = x + attention(block["attention"], normal, normal, 2, mask)
        x = x + mlp(block["mlp"], layer_norm(block["mlp_norm"], x), jax.nn.gelu)
    return log_losses(layer_norm(p["norm"], x) @ p["table"].T, texts[:, 1:]).mean()


@pytest.mark.slow
def test_same_losses_as_with_one_table():
    gpt = example("tied_gpt")
    model = gpt.new_model(jax.random.key(0))
    params = {
        "table": model.embed.weight,
        "positions": model.positions.weight,
        "blocks": arrays(model.blocks),
        "norm": arrays(model.norm),
    }
    batches = [gpt.new_batch(key) for key in keys()]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)
    model, state, losses = trained(gpt.train_step, model, gpt.tx.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, params, state, twin_state)
    assert model.embed.weight is model.lm_head.weight
    assert state[1][0].nu.embed.weight is state[1][0].nu.lm_head.weight
