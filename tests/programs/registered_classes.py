"""Classes that are registered in every way, and an instance of each."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax import tree_util as jtu

import sharedtree as st


class Fields:
    def __init__(self, a, b, m):
        self.a, self.b, self.m = a, b, m


jtu.register_dataclass(Fields, data_fields=["a", "b"], meta_fields=["m"])


@functools.partial(jtu.register_dataclass, data_fields=["a", "b"], meta_fields=["m"])
@dataclasses.dataclass
class Dataclass:
    a: Any
    b: Any
    m: Any = 0


class Zips:
    def __init__(self, **values):
        self.values = values


jtu.register_pytree_node(
    Zips,
    lambda z: (tuple(z.values.values()), tuple(z.values)),
    lambda names, xs: Zips(**dict(zip(names, xs, strict=False))),
)


class WithKeys(Zips):
    pass


jtu.register_pytree_with_keys(
    WithKeys,
    lambda z: (tuple((jtu.GetAttrKey(k), v) for k, v in z.values.items()), tuple(z.values)),
    lambda names, xs: WithKeys(**dict(zip(names, xs, strict=False))),
)


class Own(Zips):
    pass


st.register_node(
    Own, lambda z: (tuple(z.values.values()), tuple(z.values)), lambda n, xs: Own(**dict(zip(n, xs, strict=False)))
)


class Pair(NamedTuple):
    a: Any
    b: Any


class Module(eqx.Module):
    a: Any
    b: Any
    m: Any = eqx.field(static=True)


try:

    @jtu.register_static
    class Fixed:
        pass
except AttributeError:
    Fixed = None

SAMPLES = [
    Fields(np.ones(2), 2, "m"),
    Dataclass(np.ones(2), 2, "m"),
    Zips(a=np.ones(2), b=2),
    WithKeys(a=np.ones(2), b=2),
    Own(a=np.ones(2), b=2),
    Pair(np.ones(2), 2),
    Module(np.ones(2), 2, "m"),
    jtu.Partial(jax.numpy.add, 1, x=2),
    eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")[1],
]
