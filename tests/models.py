"""Small models that several files of tests use, and functions that name a part of one.

Random DAGs and their classes are in `tests/strategies.py`, one tree of every kind of node is in `tests/kinds.py`.
"""

from typing import Any

import equinox as eqx
import jax


class Leaf(eqx.Module):
    """A layer with one array."""

    weight: jax.Array


class Net(eqx.Module):
    """A model whose two layers, or arrays, may be one."""

    embed: Any
    head: Any


class BiasedNet(eqx.Module):
    """The same with a third part, which is not always there."""

    embed: Any
    head: Any
    bias: Any = None


class Dense(eqx.Module):
    """A layer with a weight, and a bias if need be."""

    weight: Any
    bias: Any = None


class Linear(eqx.Module):
    """A layer with static values, too: one in an ordinary field and one in a static field."""

    weight: Any
    bias: Any = None
    activation: Any = jax.nn.relu
    name: Any = eqx.field(static=True, default="linear")


class Scale(eqx.Module):
    """A layer that `eqx.nn.Sequential` can call."""

    weight: jax.Array

    def __call__(self, x, *, key=None):
        return self.weight * x


class Box(eqx.Module):
    """A module around anything."""

    content: Any


class StaticField(eqx.Module):
    """A module that has no leaves."""

    value: Any = eqx.field(static=True)


class Opaque:
    """A class that JAX does not know."""

    def __init__(self, layer):
        self.weight = layer


class Unprintable:
    """A callable that has no text."""

    def __call__(self, x):
        return x

    def __repr__(self):
        raise RuntimeError("of the object's own")


# --- parts of a pair of layers, as `eqx.nn.Shared` asks for them. Files name these functions. ------------------------


def embed_weight(pair):
    return pair[0].weight


def head_weight(pair):
    return pair[1].weight


def first(pair):
    return pair[0]


def second(pair):
    return pair[1]
