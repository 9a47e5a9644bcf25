"""Layers with parameters that are values, and arrays with names for their axes."""

import jax.numpy as jnp
from penzai import pz

TRUSTED = ["penzai"]


def make(w, b):
    weight = pz.ParameterValue(label="w", value=pz.nx.wrap(w, "i", "o"))
    first, second = pz.nn.Linear(weight, ("i",), ("o",)), pz.nn.Linear(weight, ("i",), ("o",))
    rename = pz.nn.RenameAxes(("o",), ("i",))
    bias = pz.nn.AddBias(pz.ParameterValue(label="b", value=pz.nx.wrap(b, "o")), new_axis_names=())
    return pz.nn.Sequential([first, pz.nn.Elementwise(jnp.tanh), rename, second, bias])


def loss(model, x):
    return (model(pz.nx.wrap(x, "i")).unwrap("o") ** 2).sum()


def places(model):
    return model.sublayers[0].weights, model.sublayers[3].weights


def bias(model):
    return model.sublayers[4].bias.value.unwrap("o")
