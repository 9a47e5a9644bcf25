"""Independent distributions, two of which have one mean."""

import distrax
import numpy as np

TRUSTED = ["distrax"]
OTHERS = [np.ones((3, 1), np.float32)]


def make(w, b, scale):
    return distrax.Joint([distrax.Normal(w, scale), distrax.Normal(w, scale), distrax.Normal(b, scale)])


def loss(model, x):
    return -model.log_prob([x, 2 * x, x]).sum()


def places(model):
    return model.distributions[0].loc, model.distributions[1].loc


def bias(model):
    return model.distributions[2]._loc  # the property is as wide as the scale


def change(model, b):
    model.distributions[2]._loc = b
