"""Modules whose annotations are checked whenever one is made or called."""
# ruff: noqa: F722

import equinox as eqx
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

from ._layers import bias as bias, two_layers


@jaxtyped(typechecker=beartype)
class Layer(eqx.Module):
    weight: Float[Array, "n m"]

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, " n"]) -> Float[Array, " m"]:
        return x @ self.weight


@jaxtyped(typechecker=beartype)
class Net(eqx.Module):
    first: Layer
    second: Layer
    bias: Float[Array, " m"]


TRUSTED = [Net, Layer]


def make(w, b):
    layer = Layer(w)
    return Net(layer, layer, b)


@jaxtyped(typechecker=beartype)
def loss(model: Net, x: Float[Array, " n"]) -> Float[Array, ""]:
    return two_layers(model.first, model.second, model.bias, x)


def places(model):
    return model.first, model.second
