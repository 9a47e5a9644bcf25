"""Checked by pyright, never run: wrapped functions keep their signatures."""

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
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


assert_type(st.copy([x]), list[jax.Array])
assert_type(st.inference_mode(st.Dag([x])), st.Dag[list[jax.Array]])
assert_type(st.inference_mode([x], False), list[jax.Array])


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, size: int) -> None:
        self.norm = eqx.nn.BatchNorm(size, "batch", mode="ema")


assert_type(st.make_with_state(Stateful)(3), tuple[Stateful, eqx.nn.State])
st.make_with_state(Stateful)("3")  # pyright: ignore[reportArgumentType]

policy = st.Policy(containers=True)
assert_type(st.jit(f, policy=policy)(x, scale=2.0), jax.Array)
assert_type(st.jit(policy=policy, donate_argnums=0)(f)(x), jax.Array)
assert_type(st.checkpoint(f, policy=policy)(x), jax.Array)
assert_type(st.checkpoint(policy=jax.checkpoint_policies.dots_saveable)(f)(x), jax.Array)
assert_type(st.value_and_grad(f, policy=policy)(x), tuple[jax.Array, Any])
assert_type(st.value_and_grad(f, 0, False)(x), tuple[jax.Array, Any])
assert_type(st.value_and_grad(policy=policy)(f)(x, scale=2.0), tuple[jax.Array, Any])
st.grad(f, (0,), policy=policy)(x, scale=3)
st.grad(policy=policy)(f)(x, scale="text")  # pyright: ignore[reportArgumentType]
st.vmap(f, 0, 0, policy=policy)(x)
st.vmap(f, 0)(1)  # pyright: ignore[reportArgumentType]

bound: Callable[[jax.Array], jax.Array] = st.jit(f)
