"""Checked by pyright, never run: what `preserve_identities` returns is known by the transform.

To mypy each overload fits a transform in whose signature there is `Any`, so that it knows nothing of what is returned.
"""

from typing import Any, assert_type

import equinox as eqx
import jax

import sharedtree as st


def f(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x * scale


x = jax.numpy.ones(2)


@st.preserve_identities(jax.jit)
def step(x: jax.Array, *, scale: float = 1.0) -> tuple[jax.Array, int]:
    return x, 3


assert_type(step(x, scale=2.0), tuple[jax.Array, int])
step.lower(x)
step("text")  # type: ignore[arg-type]


@st.preserve_identities(jax.jit, donate_argnums=0, in_place=True)
def donating(x: jax.Array) -> jax.Array:
    return x


assert_type(donating(x), jax.Array)
assert_type(st.preserve_identities(jax.jit)(f, inline=True)(x), jax.Array)
assert_type(st.preserve_identities(jax.checkpoint)(f)(x), jax.Array)


class Net(eqx.Module):
    weight: jax.Array

    @st.preserve_identities(jax.jit)
    def wrapped(self, x: jax.Array) -> int:
        return 3


def loss(net: Net, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x


net = Net(x)
assert_type(net.wrapped(x), int)
assert_type(Net.wrapped(net, x), int)
assert_type(st.preserve_identities(jax.grad)(loss)(net, x), Net)
assert_type(st.preserve_identities(jax.value_and_grad)(loss)(net, x), tuple[jax.Array, Net])
assert_type(st.preserve_identities(jax.grad, argnums=1)(loss), Any)
assert_type(st.preserve_identities(jax.jacfwd)(loss), Any)
assert_type(st.preserve_identities(jax.lax.scan)(loss, net, x), Any)
