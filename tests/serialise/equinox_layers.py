"""Every layer of Equinox, with arguments that make a small one."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

EQUINOX: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool1d": (2,), "AdaptiveAvgPool2d": (2,), "AdaptiveAvgPool3d": (2,), "AdaptiveMaxPool1d": (2,),
    "AdaptiveMaxPool2d": (2,), "AdaptiveMaxPool3d": (2,), "AdaptivePool": (2, 2, jnp.max), "AvgPool1d": (2,),
    "AvgPool2d": (2,), "AvgPool3d": (2,), "MaxPool1d": (2,), "MaxPool2d": (2,), "MaxPool3d": (2,),
    "Pool": (0, jax.lax.add, 2, 2), "BatchNorm": (3, "batch"), "Conv": (2, 1, 1, 2), "Conv1d": (1, 1, 2),
    "Conv2d": (1, 1, 2), "Conv3d": (1, 1, 2), "ConvTranspose": (2, 1, 1, 2), "ConvTranspose1d": (1, 1, 2),
    "ConvTranspose2d": (1, 1, 2), "ConvTranspose3d": (1, 1, 2), "Dropout": (0.5,), "Embedding": (3, 2),
    "GRUCell": (2, 2), "GroupNorm": (1, 2), "Identity": (), "Lambda": (jax.nn.relu,), "LayerNorm": (2,),
    "Linear": (2, 3), "LSTMCell": (2, 2), "MLP": (2, 2, 2, 1), "MultiheadAttention": (1, 2), "PReLU": (0.1,),
    "RMSNorm": (2,), "RotaryPositionalEmbedding": (2,), "StateIndex": (jnp.ones(1),),
}  # fmt: skip


def make_layer(name: str) -> Any:
    """A layer that Equinox made, with values of our own."""
    cls = getattr(eqx.nn, name)
    extra = {"key": jax.random.key(0)} if "key" in inspect.signature(cls.__init__).parameters else {}
    if name == "BatchNorm":
        extra = {"mode": "ema"}
    return filled(lambda: cls(*EQUINOX[name], **extra))


def filled(make: Callable[[], Any]) -> Any:
    """What a function makes, with values that count up: random ones would be compiled for each shape."""
    return jax.tree.map(_filled, eqx.filter_eval_shape(make))


def _filled(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jnp.asarray(np.arange(math.prod(leaf.shape)).reshape(leaf.shape).astype(leaf.dtype))
