"""A weight of two layers that has a correction of low rank."""

import equinox as eqx
import jax
import numpy as np
import quax
from quax.examples import lora

import sharedtree as st

from . import equinox
from ._layers import bias as bias, loss_of_layers

TRUSTED = [*equinox.TRUSTED, "quax"]

OTHERS = [np.full((3, 2), 0.1, np.float32), np.full((2, 3), 0.2, np.float32)]


def make(w, b, left, right):
    weight = lora.LoraArray(w, rank=2, key=jax.random.key(1), stop_gradient=False)
    weight = eqx.tree_at(lambda weight: (weight.a, weight.b), weight, (left, right))
    model = equinox.make(w, b)
    model = eqx.tree_at(lambda model: [model.first.weight, model.second.weight], model, [weight, weight])
    return st.tie(model, lambda model: (model.first.weight, model.second.weight))


loss = quax.quaxify(loss_of_layers)
places = equinox.places
