"""A normal distribution that goes through one map twice."""

import numpy as np
from distreqx import bijectors, distributions

TRUSTED = ["distreqx"]
OTHERS = [np.ones(3, np.float32)]


def make(w, b, scale):
    once = bijectors.TriangularLinear(w)
    normal = distributions.Independent(distributions.Normal(b, scale))
    return distributions.Transformed(normal, bijectors.Chain([once, once]))


def loss(model, x):
    return -model.log_prob(x)


def places(model):
    return tuple(model.bijector.bijectors)


def bias(model):
    return model.distribution.distribution.loc
