"""One block at every depth, unrolled and scanned, beside a function that is called several times."""

import jax
import jax.numpy as jnp
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, step_of, trained
from .vanilla import attention, layer_norm, linear, log_losses, mlp


def twin_loss(p, batch):
    texts, masked = batch
    x = p["embed"][masked] + p["positions"]
    for signal in p["signals"]:
        x = x + signal
        x = x + attention(p["block"]["attention"], x, x, 2)
        x = layer_norm(p["block"]["norm"], x + mlp(p["block"]["mlp"], x))
    return jnp.mean(log_losses(linear(p["head"], x), texts), where=masked == 7)


@pytest.mark.slow
def test_same_losses_as_with_one_block():
    looped = example("looped_transformer")
    start = looped.LoopedTransformer(key=jax.random.key(0))
    params = {
        "embed": start.embed.weight,
        "positions": start.positions,
        "signals": start.signals,
        "block": arrays(start.blocks[0]),
        "head": arrays(start.head),
    }
    batches = [looped.new_batch(key) for key in keys()]
    tx = optax.adam(1e-2)
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)

    for loop in (looped.unrolled, looped.scanned):

        def step(model, state, batch, loop=loop):
            return looped.train_step(model, state, batch, loop=loop)

        model, state, losses = trained(step, start, looped.tx.init(start), batches=batches)
        assert_same_losses(losses, expected)
        assert_each_once(model, params, state, twin_state)
        assert model.blocks[0] is model.blocks[1] is model.blocks[2]
        assert state[0].nu.blocks[0] is state[0].nu.blocks[1] is state[0].nu.blocks[2]
