"""How each of our transforms is called with a function of one model, for tests that do something in all of them."""

import functools

import jax
from jax.sharding import PartitionSpec as P

import sharedtree as st
from tests.transform_table import SCENARIOS

CALLS = {
    transform.__name__: functools.partial(scenario.call, getattr(st, transform.__name__))
    for transform, scenario in SCENARIOS.items()
    if hasattr(st, transform.__name__) and transform.__module__.startswith("jax")
    if scenario.tested != "on_eight_devices"
}
"""Transform → a function of the function and the model. Those that need eight devices are left out."""


def mesh():
    return jax.make_mesh((1,), ("i",))


CALLS_IN_PLACE = {
    "jit": lambda f, m: st.jit(f, in_place=True)(m),
    "vmap": lambda f, m: st.vmap(f, in_place=True)(m),
    "grad": lambda f, m: st.grad(lambda m: f(m).sum(), in_place=True)(m),
    "value_and_grad": lambda f, m: st.value_and_grad(lambda m: f(m).sum(), in_place=True)(m),
    "shard_map": lambda f, m: st.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), in_place=True)(m),
    "pmap": lambda f, m: st.pmap(f, in_place=True)(m),
    "checkpoint": lambda f, m: st.checkpoint(f, in_place=True)(m),
    "cond": lambda f, m: st.cond(True, f, lambda m: m.a, m, in_place=True),
    "switch": lambda f, m: st.switch(0, [f, lambda m: m.a], m, in_place=True),
    "scan, carried": lambda f, m: st.scan(lambda m, _: (m, f(m)), m, length=1, in_place=True),
    "scan, scanned": lambda f, m: st.scan(lambda _, m: (None, f(m)), None, m, in_place=True),
    "map": lambda f, m: st.map(f, m, in_place=True),
    "fori_loop": lambda f, m: st.fori_loop(0, 1, lambda i, m: (f(m), m)[1], m, in_place=True),
    "while_loop": lambda f, m: st.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1 + 0 * f(c[1]).sum(), c[1]), (0.0, m), in_place=True
    ),
}
"""Transform → the same, where the function changes the model in place, and returns an array."""
