"""The computation of most of these models."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

Layer = Callable[[Any], Any]


def two_layers(first: Layer, second: Layer, bias: Any, x: Any) -> Any:
    """A number that depends on all of it."""
    return ((second(jnp.tanh(first(x))) + bias) ** 2).sum()


def loss(model: Any, x: Any) -> Any:
    """Of a model with the fields `first`, `second` and `bias`, whose layers are arrays; one is used transposed."""
    return two_layers(lambda x: x @ model.first, lambda x: x @ model.second.T, model.bias, x)


def loss_of_layers(model: Any, x: Any) -> Any:
    """Of a model with the fields `first`, `second` and `bias`, whose layers are functions."""
    return two_layers(model.first, model.second, model.bias, x)


def places(model: Any) -> tuple[Any, Any]:
    return model.first, model.second


def bias(model: Any) -> Any:
    return model.bias
