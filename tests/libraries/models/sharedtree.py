import jax.numpy as jnp

import sharedtree as st

from ._layers import bias as bias, loss_of_layers


class Linear(st.Module):
    def __init__(self, weight):
        self.weight = st.parameter(weight)

    def __call__(self, x):
        return x @ self.weight


class Net(st.Module):
    def __init__(self, layer, bias):
        self.first = self.second = layer
        self.bias = st.parameter(bias)
        self.activation = jnp.tanh


TRUSTED = [Net, Linear]
loss = loss_of_layers


def make(w, b):
    return Net(Linear(w), b)


def places(model):
    return model.first, model.second


def change(model, b):
    model.bias = b
