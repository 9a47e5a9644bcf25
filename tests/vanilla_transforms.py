"""Functions that untie a model by calling a vanilla transform, one for each transform that we have in its place."""

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st
from tests.models import Leaf, Net


def tied():
    leaf = Leaf(jnp.arange(1.0, 5.0).reshape(2, 2))
    return Net(leaf, leaf)


def double(model):
    return st.tree.map(lambda x: 2 * x, model)


def loss(model):
    return (jnp.sin(model.embed.weight) * model.head.weight).sum()


def is_small(model):
    return model.embed.weight[0, 0] < 100


VANILLA = {
    "jax.lax.scan": lambda m: jax.lax.scan(lambda c, _: (double(c), None), m, None, length=2)[0],
    "jax.lax.map": lambda m: jax.lax.map(double, m),
    "jax.lax.while_loop": lambda m: jax.lax.while_loop(is_small, double, m),
    "jax.lax.fori_loop": lambda m: jax.lax.fori_loop(0, 2, lambda _, m: double(m), m),
    "jax.lax.cond": lambda m: jax.lax.cond(is_small(m), double, lambda m: m, m),
    "jax.lax.switch": lambda m: jax.lax.switch(1, [double, lambda m: m], m),
    "jax.jit": lambda m: jax.jit(double)(m),
    "jax.checkpoint": lambda m: jax.checkpoint(double)(m),
    "jax.vmap": lambda m: jax.vmap(double)(m),
    "jax.grad": lambda m: jax.grad(loss)(m),
    "jax.value_and_grad": lambda m: jax.value_and_grad(loss)(m)[1],
    "jax.vjp": lambda m: jax.vjp(loss, m)[1](1.0)[0],
    "jax.jvp": lambda m: jax.jvp(double, (m,), (m,))[1],
    "equinox.filter_jit": lambda m: eqx.filter_jit(double)(m),
    "equinox.filter_checkpoint": lambda m: eqx.filter_checkpoint(double)(m),
    "equinox.filter_vmap": lambda m: eqx.filter_vmap(double)(m),
    "equinox.filter_grad": lambda m: eqx.filter_grad(loss)(m),
    "equinox.filter_value_and_grad": lambda m: eqx.filter_value_and_grad(loss)(m)[1],
}
"""A vanilla transform → a function that unties its model by calling it, on the first line of the function."""
