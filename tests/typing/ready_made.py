"""Checked by pyright, never run: wrapped functions keep their signatures."""

from collections.abc import Callable
from typing import Any, assert_type

import jax

import sharedtree as st


def f(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x * scale


jitted = st.jit(f)
x = jax.numpy.ones(2)
assert_type(jitted(x, scale=2.0), jax.Array)
assert_type(st.jit(donate_argnums=0)(f)(x), jax.Array)
jitted.lower(x, scale=2.0)
jitted.clear_cache()
jitted(x, scale="text")  # pyright: ignore[reportArgumentType]
jitted()  # pyright: ignore[reportCallIssue]

assert_type(st.checkpoint(f)(x), jax.Array)
assert_type(st.value_and_grad(f)(x), tuple[jax.Array, Any])
st.grad(f)(x, scale=3)
st.vmap(f)(1)  # pyright: ignore[reportArgumentType]


@st.jit
def decorated(x: jax.Array) -> int:
    return 3


assert_type(decorated(x), int)

assert_type(st.Dag([x]).tree, list[jax.Array])


def same(leaf: Any) -> Any:
    return leaf


assert_type(st.tree.map(same, [x]), list[jax.Array])
assert_type(st.untie((x, x)), tuple[jax.Array, jax.Array])
assert_type(st.ties([x, x]), tuple[st.Tie, ...])
assert_type(st.count_parameters(x), int)
assert_type(st.same_sharing(x, x), bool)
assert_type(st.apply_updates([x], [x]), list[jax.Array])

bound: Callable[[jax.Array], jax.Array] = st.jit(f)
