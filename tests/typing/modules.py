"""Checked by pyright, never run: a mark has the type of its value, and a module no attributes but its own."""

import dataclasses
from typing import Any, Generic, TypeVar, assert_type

import jax
import jax.numpy as jnp

import sharedtree as st

T = TypeVar("T")


class Linear(st.Module):
    def __init__(self, inputs: int, outputs: int, *, key: jax.Array) -> None:
        self.weight = st.parameter(jax.random.normal(key, (inputs, outputs)))
        self.calls = st.state_field(0)
        self.activation = jax.nn.relu

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        return self.activation(x @ self.weight)


@dataclasses.dataclass(eq=False)
class Declared(st.Module):
    weight: jax.Array = st.parameter()  # noqa: RUF009 -- declares a field
    count: int = st.state_field(default=0)


class Typed(st.Module, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


def called(linear: Linear, x: jax.Array) -> Linear:
    linear(x)
    return linear


linear = Linear(2, 3, key=jax.random.key(0))
assert_type(linear.weight, jax.Array)
assert_type(linear.calls, int)
assert_type(linear.parameters(), Linear)
assert_type(linear.merge(linear.parameters()), Linear)
assert_type(st.jit(called)(linear, jnp.ones(2)), Linear)
assert_type(Declared(jnp.ones(2)).weight, jax.Array)
assert_type(Typed(3).value, int)
assert_type(st.parameter(), Any)

linear.missing = 3  # pyright: ignore[reportAttributeAccessIssue]
linear.merge(Typed(3))  # pyright: ignore[reportArgumentType]
