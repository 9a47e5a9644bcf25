"""Layers for twins: functions of a dictionary of arrays, whose names are those of Equinox's fields."""

import jax
import jax.numpy as jnp
import numpy as np


def linear(p, x):
    y = x @ p["weight"].T
    return y if p["bias"] is None else y + p["bias"]


def mlp(p, x, activation=jax.nn.relu):
    *hidden, last = p["layers"]
    for layer in hidden:
        x = activation(linear(layer, x))
    return linear(last, x)


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["weight"] + p["bias"]


def attention(p, x, context, heads, mask=True):
    def split(name, y):
        return linear(p[name], y).reshape(*y.shape[:-1], heads, -1)

    queries, keys, values = split("query_proj", x), split("key_proj", context), split("value_proj", context)
    scores = jnp.einsum("...qhd,...khd->...hqk", queries, keys) / np.sqrt(queries.shape[-1]).astype(np.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return linear(p["output_proj"], jnp.einsum("...hqk,...khd->...qhd", weights, values).reshape(x.shape))


def log_losses(logits, labels):
    """Of each label, the cross entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
