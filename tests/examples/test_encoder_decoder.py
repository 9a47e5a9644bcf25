"""The encoder-decoder with one embedding in three places beside one that has a single table."""

import jax
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, step_of, trained
from .vanilla import attention, layer_norm, log_losses, mlp


def twin_loss(p, batch):
    texts, written, backwards = batch
    encoder, decoder = p["encoder"], p["decoder"]
    x = p["table"][texts] + encoder["positions"]
    memory = layer_norm(encoder["norm"], x + attention(encoder["attention"], x, x, 2))
    x = p["table"][written] + decoder["positions"]
    x = x + attention(decoder["attention"], x, memory, 2)
    x = layer_norm(decoder["norm"], x + mlp(decoder["mlp"], x))
    return log_losses(x @ p["table"].T, backwards).mean()


@pytest.mark.slow
def test_same_losses_as_with_one_table():
    program = example("encoder_decoder")
    model = program.new_model(jax.random.key(0))
    params = {"table": model.encoder.embed.weight, "encoder": arrays(model.encoder), "decoder": arrays(model.decoder)}
    del params["encoder"]["embed"], params["decoder"]["embed"]
    batches = [program.new_batch(key) for key in keys()]
    tx = optax.adam(1e-2)
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)
    model, state, losses = trained(program.train_step, model, program.tx.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, params, state, twin_state)
    for tree in (model, state[0].mu):
        assert tree.encoder.embed is tree.decoder.embed
        assert tree.encoder.embed.weight is tree.head.weight
